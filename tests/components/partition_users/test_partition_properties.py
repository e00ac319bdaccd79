"""What the guarantee rests on: where users go depends on them alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.portability.api import beam_runner_api_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from fedemb.data.identity import Hasher, KeyRef, shard_of
from fedemb.data.sources import Part
from fedemb.errors import PlanMismatch, StorageError
from fedemb.ledger import read_reservation
from fedemb.partition import shards, transforms
from fedemb.partition.prepare import Assigner, UserPart, merge, new_part, settle
from fedemb.partition.transforms import Job, build_public
from fedemb.steps import partition_users
from tests.kit.pipeline_runs.partition_run import (
    KEY,
    Partitioner,
    context_of,
    make_config,
    reserve_for,
    reserved_config,
    rows_of,
    user_key,
    write_parquet,
)
from tests.kit.verified import without_digests


def test_user_is_in_exactly_one_virtual_client_per_grouping(partition: Partitioner) -> None:
    result = partition(rows_of(30), partition__groupings=6)
    training = set(result.records())
    for groups in result.groups():
        assert sum(len(group) for group in groups) == len(training)
        assert frozenset().union(*groups) == training


def test_spill_round_trip_keeps_the_order(tmp_path: Path) -> None:
    """With and without a file, and while several workers write to one file."""
    data = [bytes([n]) * (n + 1) for n in range(200)]
    orders = []
    for path in ("", str(tmp_path / "images")):
        workers = [shards.Spill(path), shards.Spill(path)]
        with ThreadPoolExecutor(4) as pool:
            tokens = list(pool.map(lambda n, w=workers: w[n % 2].put(data[n]), range(200)))
        assert [workers[0].get(token) for token in tokens] == data
        orders.append(sorted(range(200), key=tokens.__getitem__))
    assert orders[0] == orders[1]


def test_spill_on_a_full_disk_is_a_storage_error() -> None:
    with pytest.raises(StorageError, match="TMPDIR"):
        shards.Spill("/dev/full").put(b"image")


def test_public_bytes_do_not_depend_on_the_users(tmp_path: Path, caplog) -> None:
    """Nor on whether they are fewer than the public lower bound."""
    made = []
    for users in (5, 20, 21):
        config = reserved_config(tmp_path / str(users), users)
        reserve_for(config, tmp_path / str(users))
        caplog.clear()
        caplog.set_level("INFO", logger="fedemb")
        partition_users.run(context := context_of(config, tmp_path / str(users)))
        made.append([record.getMessage() for record in caplog.records])
        made[-1].append(without_digests(context.artifacts.users))
    assert made[0] == made[1] == made[2]
    assert len(made[0]) > 1


def test_removing_a_user_changes_one_group_per_grouping_and_nothing_else(
    partition: Partitioner,
) -> None:
    rows = rows_of(30)
    before = partition(rows)
    gone = next(iter(before.records()))
    after = partition([row for row in rows if user_key(row["user_id"]) != gone])
    for old, new in zip(before.groups(), after.groups(), strict=True):
        changed = [(a, b) for a, b in zip(old, new, strict=True) if a != b]
        assert len(changed) == 1
        assert changed[0][0] - changed[0][1] == {gone}
        assert changed[0][1] <= changed[0][0]
    expected = before.records()
    del expected[gone]
    assert after.records() == expected
    assert after.records("evaluation") == before.records("evaluation")


@pytest.mark.long
def test_output_is_the_same_bytes_in_any_order_and_split(partition: Partitioner) -> None:
    rows = [*rows_of(25), *rows_of(4), {"image": b"x", "user_id": "user 3", "label": "1"}]
    first = partition(rows, row_group_size=1000)
    shuffled = random.Random(7).sample(rows, len(rows))
    threads = ["--direct_running_mode=multi_threading", "--direct_num_workers=3"]
    assert partition(shuffled, row_group_size=5).files == first.files
    assert partition(shuffled, row_group_size=11, options=threads).files == first.files


def test_step_repeated_leaves_the_same_bytes_and_no_leftovers(partition: Partitioner) -> None:
    from fedemb.steps.partition_users import partition_images

    rows = rows_of(10)
    result = partition(rows, partition__shards=3)
    fresh = partition(rows)
    stale = result.root / "users" / "users-00000-of-00009.arrayrecord"
    stale.write_bytes(b"of an earlier attempt")
    partition_images(
        make_config(str(partition.folder / "rows-1.parquet")),
        keys=KeyRef("", "", throwaway=KEY),
        root=str(result.root),
        blocks=None,
        header={"run_id": "run"},
    )
    tokens = {f"partition/fencing_tokens/{n:06d}" for n in (1, 2)}
    assert {name: sha for name, sha in result.files.items() if name not in tokens} == {
        name: sha for name, sha in fresh.files.items() if name not in tokens
    }
    assert [path.name for path in (result.root / "partition").iterdir()] == ["fencing_tokens"]


@pytest.mark.parametrize("scope", ["user", "global"])
def test_evaluation_shares_no_user_and_no_class_with_training(
    partition: Partitioner, scope: str
) -> None:
    rows = [{**row, "label": f"class {n % 17}"} for n, row in enumerate(rows_of(60))]
    result = partition(
        rows, data__source__label_scope=scope, partition__evaluation={"by": "hash", "fraction": 0.4}
    )
    training, evaluation = result.records(), result.records("evaluation")
    assert training
    assert evaluation
    assert not set(training) & set(evaluation)
    classes = [
        {label for record in side.values() for label in record.labels}
        for side in (training, evaluation)
    ]
    assert not classes[0] & classes[1]
    kept = sum(len(record.images) for side in (training, evaluation) for record in side.values())
    assert kept + result.counts["dropped_cross_split"] == len(rows)
    assert (result.counts["dropped_cross_split"] > 0) == (scope == "global")


POISSON = {
    "kind": "poisson_gaussian",
    "rounds": 2,
    "noise_multiplier": 1.0,
    "sampling_probability": 0.1,
    "units_per_round": 10,
}


@pytest.mark.parametrize("key", range(5))
def test_listed_classes_are_held_out_and_unlisted_dropped(key: int) -> None:
    classes = [str(n) for n in range(10)]
    evaluation = {"by": "hash", "fraction": 0.1, "classes": classes}
    config = make_config(
        "rows.parquet", data__source__label_scope="global", partition__evaluation=evaluation
    )
    assigner = Assigner(config, Hasher(bytes([key]) * 32), None)
    goes = {
        label: {assigner.assign(str(user), label, None, None).dropped for user in range(200)}
        for label in (*classes, "another")
    }
    assert goes["another"] == {"dropped_unlisted_class"}
    held = [
        label
        for label in classes
        if any(
            found.held_out and not found.dropped
            for found in (assigner.assign(str(user), label, None, None) for user in range(200))
        )
    ]
    assert len(held) == 2


def test_unlisted_labels_are_dropped_and_do_not_change_class_numbers() -> None:
    """A label that is not listed goes nowhere, as often as it comes, and moves no number."""
    config = make_config(
        "rows.parquet",
        task="classification",
        data__source__label_scope="global",
        model__classes=["owl", "cat", "dog"],
        training__algorithm="dp_sgd",
        training__unit_gradient__microbatch=8,
        mechanism=POISSON,
    )
    assigner = Assigner(config, Hasher(bytes(32)), None)

    def assigned(label: str) -> tuple[int, str]:
        found = assigner.assign("somebody", label, None, None)
        return found.class_id, found.dropped

    for label in ("yak", "bee", "yak", "cats", ""):
        assert assigned(label) == (-1, "dropped_unlisted_class")
        assert [assigned(name) for name in ("owl", "cat", "dog")] == [(0, ""), (1, ""), (2, "")]


def test_split_by_value_holds_out_whole_users(partition: Partitioner) -> None:
    rows = [{**row, "alphabet": "AB"[n % 2]} for n, row in enumerate(rows_of(6, images=1))]
    both = [{**rows[0], "image": rows_of(9)[-1]["image"], "alphabet": "B"}]
    result = partition(
        rows + both, partition__evaluation={"by": "value", "column": "alphabet", "values": ["B"]}
    )
    held_out = {user_key(f"user {n}") for n in (0, 1, 3, 5)}
    assert set(result.records("evaluation")) == held_out
    assert set(result.records()) == {user_key(f"user {n}") for n in (2, 4)}
    assert result.counts["dropped_cross_split"] == 1


def test_only_users_of_reserved_blocks_of_a_cohort_train(partition: Partitioner) -> None:
    rows = [{**row, "month": f"2026-0{1 + n % 2}"} for n, row in enumerate(rows_of(40, images=1))]
    how: dict[str, Any] = {
        "data__source__columns__cohort": "month",
        "partition__cohorts": ["2026-01", "2026-02"],
        "partition__blocks_per_cohort": 4,
    }
    everyone = partition(rows, **how).records()
    some = partition(rows, **how, blocks=frozenset({"2026-01/1", "2026-02/3"})).records()
    expected = {k: r for k, r in everyone.items() if r.block in ("2026-01/1", "2026-02/3")}
    assert {record.block for record in expected.values()} == {"2026-01/1", "2026-02/3"}
    assert some == expected


def test_user_in_several_cohorts_is_dropped(partition: Partitioner) -> None:
    """Whichever cohort a rule picked, another one would be charged once records come or go."""
    rows = [{**row, "month": f"2026-0{1 + n % 3}"} for n, row in enumerate(rows_of(12, images=1))]
    moved = [{**row, "month": "2026-03", "image": rows_of(99)[-1]["image"]} for row in rows[:1]]
    cohort: dict[str, Any] = {"data__source__columns__cohort": "month"}
    result = partition(rows + moved, partition__cohorts=["2026-03"], **cohort)
    seen = {**result.records(), **result.records("evaluation")}
    assert set(seen) == {user_key(f"user {n}") for n in (2, 5, 8, 11)}
    assert result.counts["dropped_several_cohorts"] == 1
    assert {record.block for record in result.records().values()} <= {"2026-03/0"}
    early = partition(rows + moved, partition__cohorts=["2026-01"], **cohort)
    seen = {**early.records(), **early.records("evaluation")}
    assert set(seen) == {user_key(f"user {n}") for n in (3, 6, 9)}
    assert early.counts["dropped_several_cohorts"] == 1


def test_cap_keeps_the_images_with_the_smallest_digests(partition: Partitioner) -> None:
    rows = rows_of(3, images=9)
    capped = partition(rows, partition__max_images_per_user=4)
    whole = partition(rows)
    for key, record in whole.records().items():
        assert capped.records()[key].images == record.images[:4]
    held = len(whole.records("evaluation"))
    assert capped.counts["dropped_over_cap"] == 5 * (len(whole.records()) + held)


def test_images_that_are_also_public_are_dropped(partition: Partitioner, tmp_path: Path) -> None:
    rows = rows_of(12)
    public = write_parquet(tmp_path / "public.parquet", rows[:4])
    result = partition(rows, pretraining={"kind": "supervised", "source": {"uri": public}})
    assert result.counts["in_public_set"] == 4
    assert {row["reason"] for row in result.rejects()} == {"in_public_set"}
    assert user_key("user 0") not in {**result.records(), **result.records("evaluation")}


@st.composite
def parts(draw: st.DrawFn) -> list[UserPart]:
    image = st.tuples(st.integers(0, 3), st.integers(1, 2), st.binary(min_size=1, max_size=1))
    images = st.dictionaries(st.binary(min_size=1, max_size=1), image, max_size=4)
    text = st.one_of(st.none(), st.sampled_from("abc"))
    part = st.tuples(text, text, images, images, st.integers(0, 9), st.integers(0, 9))
    return draw(st.lists(part, min_size=1, max_size=6))


@given(several=parts(), cap=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_merging_parts_of_a_user_does_not_depend_on_order(
    several: list[UserPart], cap: int, seed: int
) -> None:
    def fold(sequence: list[UserPart]) -> UserPart:
        merged = new_part()
        for part in sequence:
            merged = merge(merged, part, cap)
        return merged

    expected = fold(several)
    shuffled = random.Random(seed).sample(several, len(several))
    cut = seed % len(several)
    assert fold(shuffled) == expected
    assert merge(fold(shuffled[:cut]), fold(shuffled[cut:]), cap) == expected
    digests = sorted(set().union(*(part[2] for part in several)))[:cap]
    assert sorted(expected[2]) == digests
    for digest in digests:
        assert expected[2][digest][1] == sum(p[2][digest][1] for p in several if digest in p[2])


def test_groupings_are_balanced_and_stable_when_more_are_added() -> None:
    hasher = Hasher(KEY)
    keys = [hasher.user_key(str(n)) for n in range(20_000)]
    few, many = (np.stack(list(hasher.groups(keys, n, 10))) for n in (3, 9))
    np.testing.assert_array_equal(few, many[:3])
    counts = np.stack([np.bincount(row, minlength=10) for row in many])
    assert (np.abs(counts - 2000) < 6 * np.sqrt(2000)).all()
    together = ((many[:, :5000, None] == many[:, None, :5000][:, :, :50]).mean((1, 2))).mean()
    assert abs(together - 0.1) < 0.01
    assert not np.array_equal(many[0], many[1])


def test_share_of_users_held_out_is_the_fraction() -> None:
    hasher = Hasher(KEY)
    keys = [hasher.user_key(str(n)) for n in range(20_000)]
    held = np.mean([hasher.holds_out_user(key, 0.1) for key in keys])
    assert abs(held - 0.1) < 6 * np.sqrt(0.1 * 0.9 / 20_000)


@given(st.lists(st.binary(min_size=8, max_size=8), min_size=2), st.integers(1, 1000))
def test_shards_are_ordered_by_user_key(keys: list[bytes], shards: int) -> None:
    numbers = [shard_of(key, shards) for key in sorted(keys)]
    assert numbers == sorted(numbers)
    assert 0 <= numbers[0] <= numbers[-1] < shards


# ---- A user with images on both sides of the split is held out whole ----


USER = bytes(range(16))


def images(side, count):
    return {f"{side} {n}".encode(): (n, 1, b"png") for n in range(count)}


@pytest.mark.parametrize(("train", "held"), [(1, 5), (5, 1), (2, 2), (200, 1), (0, 3), (3, 0)])
def test_one_held_out_image_holds_out_the_whole_user(train, held):
    assigner, counts = Assigner(make_config("rows.parquet"), Hasher(bytes(32)), None), Counter()
    part = (None, None, images("train", train), images("held", held), train, held)
    found = settle(USER, part, {"all"}, assigner, counts)
    assert found.held_out == (held > 0)
    side = "held" if held else "train"
    assert dict(found.images) == images(side, held or train)
    assert counts["dropped_cross_split"] == (train if held else 0)


# ---- A resumed training keeps its original users, also those deleted at the source since ----


def test_resumed_training_keeps_its_original_users(tmp_path):
    config = reserved_config(tmp_path, users=30)
    reserve_for(config, tmp_path)
    context = context_of(config, tmp_path)
    made = partition_users.run(context)

    def begin():
        """Binds, as the trainer does before its first round; again it must be the same."""
        context.writable_ledger.bind(
            read_reservation(context.artifacts.reservation),
            inputs_sha="1" * 64,
            commitments=made["commitments"],
            private_root="2" * 64,
        )

    begin()
    write_parquet(tmp_path / "rows.parquet", rows_of(29))
    assert partition_users.run(context_of(config, tmp_path)) == made
    begin()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition_users, "_begun_with", lambda *_: None)
        with pytest.raises(PlanMismatch, match="changed since the budget was reserved"):
            partition_users.run(context_of(config, tmp_path))


# ---- What lets partition_users grow: read off the graph that is sent to a Beam engine ----


BY_CONSTANTS = {"ByShard", "ByGroups", "ByFolder", "ByRejectShard", "ByRange"}
"""Grouped by hash range: shards, files of groups, folders."""
CAP = "CapPerUser"

proto: Any = beam_runner_api_pb2  # generated: no types


def graph_of(options: dict[str, Any] | None = None) -> Any:
    """The graph of both passes, as it is sent."""
    config = make_config("rows.parquet", **(options or {}))
    job = Job(config, KeyRef("keys", "policy"), shards.Place("root", None), None)
    pipeline = beam.Pipeline(runner="FnApiRunner")
    files = [Part("/", f"rows-{number}.parquet") for number in range(3)]
    transforms.build(pipeline, job, files)
    build_public(pipeline, job, config.data.source, files)
    return pipeline.to_runner_api()


def faults(graph: Any) -> list[str]:
    """What would not scale."""
    every = graph.components.transforms
    parents = {child: name for name, node in every.items() for child in node.subtransforms}
    producers = {
        output: name
        for name, node in every.items()
        if not node.subtransforms
        for output in node.outputs.values()
    }
    user_parts = next(
        output
        for node in every.values()
        if node.unique_name == "Prepare/ParDo(_Prepare)"
        for tag, output in node.outputs.items()
        if tag not in ("counts", "rejects")
    )

    def ancestors(name: str) -> Iterator[Any]:
        while name in parents:
            name = parents[name]
            yield every[name]

    def combines(name: str) -> bool:
        return any(node.spec.urn == "beam:transform:combine_per_key:v1" for node in ancestors(name))

    def uncapped(name: str) -> bool:
        """Whether parts of users reach a transform on a way around the cap."""
        seen, ahead = set[str](), {name}
        while ahead:
            node = every[ahead.pop()]
            if node.unique_name.startswith(f"{CAP}/"):
                continue
            inputs = set(node.inputs.values()) - seen
            seen |= inputs
            ahead |= {producers[one] for one in inputs}
        return user_parts in seen

    found = []
    for name, node in every.items():
        if node.subtransforms:
            continue
        if node.spec.urn == "beam:transform:pardo:v1":
            payload = proto.ParDoPayload.FromString(node.spec.payload)
            found += [f"side input of {node.unique_name}" for _ in payload.side_inputs]
        if node.spec.urn == "beam:transform:group_by_key:v1":
            label = node.unique_name.split("/")[0]
            spread = "/ReshufflePerKey/" in node.unique_name
            if not (spread or combines(name) or label in BY_CONSTANTS):
                found.append(f"{node.unique_name} groups by keys that grow with the data")
            if not spread and uncapped(name):
                found.append(f"{node.unique_name} sees users before their images are capped")
    labels = {node.unique_name: node.spec.urn for node in every.values()}
    if labels.get(CAP) != "beam:transform:combine_per_key:v1":
        found.append("the per-user cap is not a combiner")
    return found


def test_beam_graph_has_no_side_inputs_or_keys_that_grow_with_the_data() -> None:
    assert faults(graph_of()) == []


def test_graph_holds_no_key_and_its_size_does_not_follow_shards_or_groups() -> None:
    small = graph_of().SerializeToString()
    large = graph_of(
        {
            "partition__shards": 10_000,
            "partition__groupings": 40,
            "partition__virtual_clients": 3_000_000,
        }
    ).SerializeToString()
    assert len(large) < len(small) + 2_000
    assert KEY.hex().encode() not in small
