"""Each benchmark runs to its last line, at a tiny size."""

from pathlib import Path

import pytest

from tests.benchmarks import poster
from tests.conftest import REPOSITORY
from tests.kit.process import python

ARGUMENTS = {
    "bench_memory": (),
    "bench_rounds": ("--cores", "1", "--turns", "1", "--peers", "jax_privacy"),
    "bench_scale": (),
    "poster": ("--quick",),
}


def test_every_benchmark_is_run():
    found = {path.stem for path in Path(__file__).parent.glob("*.py")}
    libraries = {"peers", "plain_loop", "tiny"}
    assert {name for name in found - libraries if not name.startswith("test_")} == set(ARGUMENTS)


@pytest.mark.long
@pytest.mark.parametrize("name", ARGUMENTS)
def test_benchmark_runs_to_its_last_line(name):
    assert python("-m", f"tests.benchmarks.{name}", *ARGUMENTS[name], env={"BENCH_TINY": "1"})


def test_documented_benchmark_workloads_match_the_code():
    from fedemb.config import ModelConfig
    from fedemb.models.backbones import build_backbone
    from tests.benchmarks.bench_rounds import WORKS

    first, second = WORKS["W1"], WORKS["W2"]
    assert (first.backbone, first.clients, first.examples) == ("lenet", 16, 128)
    assert (second.backbone, second.clients, second.examples) == ("resnet8", 8, 64)
    text = (REPOSITORY / "docs/explanation/performance.md").read_text()
    net = build_backbone(ModelConfig(backbone="lenet", image_size=28, channels=1), 0)
    assert f"16 virtual clients of 128 images 28 x 28 grey, LeNet ({net.count_params():,}" in text
    assert "8 virtual clients of 64 images 32 x 32 in colour, ResNet-8" in text


# ---- The published figures come out ----


def test_group_poisson_epsilon_at_the_noise_of_the_poster_is_3_03():
    group, doubled = poster.honest(1.28)
    assert group == pytest.approx(3.03, rel=5e-3)
    assert doubled == pytest.approx(9.42, rel=5e-3)
    assert poster.DELTA == 1e-7


@pytest.mark.slow
def test_paper_epsilons_are_reproduced():
    assert all(row.ok for row in poster.poster_rows())


@pytest.mark.slow
@pytest.mark.parametrize("users", poster.PUBLISHED)
def test_equal_utility_table_matches_the_page(users):
    group, *others = poster.utility_rows(users)
    assert all(row.ok for row in (group, *others))
    assert users < 10_000_000 or "0.501" in group.note
