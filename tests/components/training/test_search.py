"""A private search inside one attempt: the best of a secret number of trials, and no trace."""

import json
import logging
import shutil
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial

import numpy as np
import pytest

from fedemb.config.search import SearchConfig
from fedemb.documents.evidence import MODEL_FILES
from fedemb.engine import feature_cache, load_backbone
from fedemb.engine.audit.attempt_keys import AttemptKeys
from fedemb.engine.micro_batches import MicroBatches
from fedemb.errors import Diverged, Refused, SignatureInvalid
from fedemb.foundation.digests import tree_digests
from fedemb.keys.signatures import Signer
from fedemb.ledger import read_reservation
from fedemb.steps.delete_expired.retention import KnownRun, Retention, delete, find_expired
from fedemb.steps.train_dp_fedemb import train as embeddings
from fedemb.steps.train_dp_sgd import train as classifier
from fedemb.storage import LocalStore
from fedemb.storage.fencing import FencingToken
from fedemb.training import attempt, checkpoint, search
from fedemb.training.feature_caches import FeatureCaches
from fedemb.training.round_log import RoundLog
from fedemb.training.search import draw_recipes
from fedemb.training.signed_state import Origin, SignedState
from tests.kit.pipeline_runs.training_run import (
    RUN_ID,
    ReadyRun,
    classifier_config,
    config,
    prepare,
)

RECIPES = {
    "slow": {"training.server.learning_rate": 0.05},
    "fast": {"training.server.learning_rate": 2.0, "mechanism.rounds": 2},
    "clip": {"mechanism.l2_norm_clip": 0.3},
}
STEPS = {"classification": classifier, "embedding": embeddings}
TRIALS = 3


def searched(which, *, law="geometric", mean=3, recipes=None, **changes):
    found = {"mean_trials": mean, "law": law, "recipes": recipes or RECIPES}
    return which(**changes, tuning={"data": "search", "method": "a grid", "search": found})


HEAD = {
    "model.trainable": "head",
    "training.unit_gradient": {"images_per_unit": 2, "microbatch": 4},
}
PROJECTION = {"model.trainable": "projection", "model.projection_units": 6}
CONFIGS = {
    "head": searched(classifier_config, **HEAD),
    "projection": searched(config, **{"mechanism.rounds": 3, **PROJECTION}),
    "classifier": searched(classifier_config),
    "embedding": searched(config, **{"mechanism.rounds": 3}),
}
QUICK = "head"


class Killed(BaseException):
    """What a test raises where a kill would strike."""


def copy(run, root):
    shutil.copytree(run.root, root)
    return ReadyRun(root, run.config)


def train(run, root_key):
    return STEPS[run.config.task].run(run.context(), root_key=root_key)


@dataclass
class Draws:
    """The trials of every root key, of one prepared run."""

    search: SearchConfig
    keys: AttemptKeys

    @classmethod
    def of(cls, prepared, root):
        """Reads the inputs of the attempt where the search would start."""
        seen = {}

        def note(_context, bound, *_, **_settings):
            seen["inputs"] = bound.inputs
            raise Killed

        run = copy(prepared, root)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attempt, "find_best", note)
            with pytest.raises(Killed):
                train(run, bytes(32))
        keys = AttemptKeys(bytes(32), seen["inputs"].run_id, 1, seen["inputs"].inputs_sha)
        return cls(run.config.tuning.search, keys)

    def recipes(self, root_key):
        """The recipe of each trial."""
        return draw_recipes(replace(self.keys, root_key=root_key), self.search)

    def key(self, suits):
        """A root key whose trials suit."""
        return next(key for n in range(2000) if suits(self.recipes(key := n.to_bytes(32, "big"))))


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=[] if n == QUICK else pytest.mark.slow) for n in CONFIGS],
)
def prepared(request, tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("prepared"), CONFIGS[request.param], users=60)


@pytest.fixture(scope="module")
def draws(prepared, tmp_path_factory):
    return Draws.of(prepared, tmp_path_factory.mktemp("draws") / "run")


@pytest.fixture(scope="module")
def key(draws):
    """A root key with three trials, the first two of one recipe."""
    return draws.key(lambda found: len(found) == TRIALS and found[0] == found[1] != found[2])


@pytest.fixture(scope="module")
def finished(prepared, key, tmp_path_factory):
    """A finished search whose losers were kept."""
    run = copy(prepared, tmp_path_factory.mktemp("finished") / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_delete_others", lambda *_: None)
        train(run, key)
    return run


@pytest.mark.parametrize("field", ["root_key", "run_id", "attempt", "inputs_sha"])
def test_trials_follow_from_the_secret_key_and_the_attempt(field):
    """The number of trials is secret: public inputs alone must not give it."""
    terms = searched(classifier_config, mean=200, **HEAD).tuning.search
    keys = AttemptKeys(b"k" * 32, "run", 1, "a" * 64)
    other = {"root_key": b"j" * 32, "run_id": "run-2", "attempt": 2, "inputs_sha": "b" * 64}
    drawn = draw_recipes(keys, terms)
    assert draw_recipes(keys, terms) == drawn
    assert draw_recipes(replace(keys, **{field: other[field]}), terms) != drawn


def state_of(run):
    return run.private / "train" / "attempt-1"


def trial(run, number):
    return state_of(run) / f"trial-{number:06d}"


def signed(path):
    return json.loads(path.read_bytes().partition(b"\n")[2])


def card_of(run):
    return json.loads((run.root / "model" / "model.json").read_text())


def outputs(run, number):
    """The digests of the noised outputs of a trial, in order."""
    records = sorted((trial(run, number) / "rounds").glob("*.record"))
    heads = [record.read_bytes().partition(b"\n")[2].partition(b"\n\0")[0] for record in records]
    return [json.loads(head)["public"]["output_sha"] for head in heads]


def test_drawn_trials_run_and_the_best_is_published(finished, draws, key):
    recipes = draws.recipes(key)
    scores = [signed(trial(finished, number) / "score.json")["score"] for number in range(TRIALS)]
    assert not trial(finished, TRIALS).exists()
    assert all(0 <= score <= 1 for score in scores)
    best = max(range(TRIALS), key=lambda number: (scores[number], -number))
    card = card_of(finished)
    assert card["recipe"] == recipes[best]
    assert card["rounds_run"] == finished.config.tuned(recipes[best]).mechanism.rounds
    lines = (finished.root / "model" / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["output_sha"] for line in lines] == outputs(finished, best)
    assert set(tree_digests(finished.root / "model")) == MODEL_FILES


def require_frozen(run):
    if run.config.model.trainable == "all":
        pytest.skip("this configuration has no frozen features")


class Computed:
    """Counts the images whose features are computed."""

    def __init__(self, monkeypatch):
        self.images, compute = 0, MicroBatches.__call__

        def counting(batches, images):
            self.images += len(images)
            return compute(batches, images)

        monkeypatch.setattr(MicroBatches, "__call__", counting)


def has_features(run):
    return any(path.is_file() for path in state_of(run).rglob("features/**/*"))


@pytest.mark.long
def test_trials_share_features_and_have_the_bits_of_trials_without(
    prepared, finished, key, tmp_path, monkeypatch
):
    """The fixture `finished` shares; here every trial computes its own."""
    require_frozen(prepared)
    shared, alone = (copy(prepared, tmp_path / name) for name in ("shared", "alone"))
    monkeypatch.setattr(search, "_delete_others", lambda *_: None)
    computed = Computed(monkeypatch)
    train(shared, key)
    shared_images, opened = computed.images, FeatureCaches.open

    def own(caches, *arguments):
        caches.delete()
        return opened(caches, *arguments)

    monkeypatch.setattr(FeatureCaches, "open", own)
    train(alone, key)
    for run in (shared, alone):
        assert tree_digests(run.root / "model") == tree_digests(finished.root / "model")
        for number in range(TRIALS):
            assert outputs(run, number) == outputs(finished, number)
        assert not has_features(run)
    assert computed.images - shared_images > 1.5 * shared_images


def stop_after_first_trial(run, root_key):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "score", _kill)
        with pytest.raises(Killed):
            train(run, root_key)


def _kill(*_):
    raise Killed


@pytest.fixture
def stopped(prepared, key, tmp_path):
    """A search killed after its first trial, with all features in its working state."""
    require_frozen(prepared)
    run = copy(prepared, tmp_path / "stopped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_cache, "_BLOCK", 7)
        stop_after_first_trial(run, key)
    return run


def blocks(run):
    return sorted((state_of(run) / "features").rglob("*.npz"))


def test_search_killed_while_it_computes_features_resumes_to_the_same_bits(
    prepared, finished, key, tmp_path, monkeypatch
):
    require_frozen(prepared)
    run = copy(prepared, tmp_path / "run")
    monkeypatch.setattr(feature_cache, "_BLOCK", 7)
    save = feature_cache.FeatureCache.save

    def killing(cache):
        save(cache)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(feature_cache.FeatureCache, "save", killing)
        with pytest.raises(Killed):
            train(run, key)
    assert len(blocks(run)) == 1
    train(run, key)
    assert tree_digests(run.root / "model") == tree_digests(finished.root / "model")
    assert not has_features(run)


def test_features_of_a_killed_search_expire_with_its_working_state(stopped):
    """`fedemb gc` deletes them with the checkpoints of the run."""
    last = datetime(2026, 1, 1, tzinfo=UTC)
    private = str(stopped.root / "private")
    run = KnownRun(stopped.private.name, "open", last)
    now = last + timedelta(days=2)
    expired = find_expired([run], Retention(open_days=1), now, private, None)
    (found,) = (item for item in expired if item.kind == "working")
    names = {path.relative_to(stopped.root / "private").as_posix() for path in blocks(stopped)}
    assert names
    assert names <= set(found.names)
    delete(found)
    assert not has_features(stopped)


def _other_byte(run, name):
    block = state_of(run) / name
    block.write_bytes(block.read_bytes()[:-1] + b"x")


def _unsigned(run, name):
    block = state_of(run) / name
    block.write_bytes(block.read_bytes().partition(b"\n")[2])


def _swapped(run, name):
    (state_of(run) / name).write_bytes(blocks(run)[1].read_bytes())


def _signed_for(run, name, **other):
    """The same features, signed with the trainer's key for another search."""
    context, data = run.context(), (state_of(run) / name).read_bytes().partition(b"\n")[2]
    reservation = read_reservation(context.artifacts.reservation)
    trust, ledger = context.ledger.chain.trust, context.ledger
    bound = ledger.attempt(reservation).bind.body["inputs_sha"]
    origin = replace(Origin(RUN_ID, 1, bound), **other)
    turn = FencingToken(str(run.root / "turns of others"), "train")
    signer = Signer.newest(context.keys, "trainer")
    store = SignedState(
        LocalStore(state_of(run)), turn, origin, signer, trust, reservation.sequence
    )
    store.write(name, data)


FORGERIES = {
    "byte": _other_byte,
    "unsigned": _unsigned,
    "swapped": _swapped,
    "run": partial(_signed_for, run_id="run-2"),
    "attempt": partial(_signed_for, attempt=2),
    "users": partial(_signed_for, inputs_sha="b" * 64),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_features_that_the_search_did_not_write_are_refused(stopped, key, forgery):
    name = blocks(stopped)[0].relative_to(state_of(stopped)).as_posix()
    FORGERIES[forgery](stopped, name)
    with pytest.raises(SignatureInvalid, match="of the working state"):
        train(stopped, key)


def test_features_signed_for_the_same_search_are_read(stopped, finished, key):
    """Control for the test above."""
    _signed_for(stopped, blocks(stopped)[0].relative_to(state_of(stopped)).as_posix())
    train(stopped, key)
    assert tree_digests(stopped.root / "model") == tree_digests(finished.root / "model")


def test_two_trials_of_one_recipe_share_no_coins_and_no_noise(finished):
    """Equal noise would cancel between a trial and the next."""
    first, second = outputs(finished, 0), outputs(finished, 1)
    assert len(first) == len(second) > 0
    assert not set(first) & set(second)


ACTS = (
    (RoundLog, "commit", False),
    (checkpoint, "save", False),
    (search, "score", False),
    (search, "_delete_others", True),
    (attempt, "_publish", True),
)
"""Where a kill strikes: in a round, after a checkpoint, after a score, and after the choice."""


@pytest.mark.long
def test_killed_search_resumes_to_the_same_trials_and_bits(
    prepared, finished, key, tmp_path, monkeypatch
):
    run = copy(prepared, tmp_path / "run")
    for place, name, before in ACTS:
        original = getattr(place, name)

        def killing(*arguments, act=original, first=before):
            if not first:
                act(*arguments)
            raise Killed

        monkeypatch.setattr(place, name, killing)
        with pytest.raises(Killed):
            train(run, key)
        monkeypatch.undo()
    train(run, key)
    assert tree_digests(run.root / "model") == tree_digests(finished.root / "model")
    left = {path.name for path in state_of(run).glob("trial-*")}
    losers = [trial(run, number) for number in range(TRIALS)]
    assert sum(any(folder.rglob("*.record")) for folder in losers) == 1, left
    ledger = run.context().writable_ledger
    kinds = [record.kind for record in ledger.chain.records]
    assert kinds == ["policy", "reserve", "bind", "commit"], "one charge, no trace of a trial"


def public_traces(run, key, caplog):
    """What leaves the private root, without digests and numbers of the model itself."""
    caplog.clear()
    with caplog.at_level(logging.INFO):
        train(run, key)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("fedemb")]
    names = sorted(path.relative_to(run.root).as_posix() for path in run.root.rglob("*"))
    shown = [name for name in names if not name.startswith(("private/", "keys/"))]
    return lines, shown, sorted(card_of(run))


@pytest.mark.long
def test_nothing_public_shows_the_number_of_trials(prepared, draws, tmp_path, caplog):
    keys = [draws.key(lambda found, n=n: len(found) == n) for n in (1, 4)]
    one, four = (
        public_traces(copy(prepared, tmp_path / str(n)), key, caplog) for n, key in enumerate(keys)
    )
    assert one == four
    assert [line for line in one[0] if "trial" in line and "private search" not in line] == []


@pytest.mark.long
def test_trial_that_is_not_finite_has_the_lowest_score(tmp_path, monkeypatch):
    """A NaN never wins; if nothing else is left, the search ends without a model."""
    broken = {"a": {"training.server.learning_rate": 1e3}, "b": RECIPES["slow"]}
    run = prepare(tmp_path / "run", searched(classifier_config, recipes=broken, **HEAD), users=60)
    draws = Draws.of(run, tmp_path / "draws")

    def diverging(store, settings, model):
        bad = model is not None and diverging.recipes.pop(0) == "a"
        return None if bad else 0.0  # the lowest score that a finite trial can have

    monkeypatch.setattr(search, "score", diverging)
    key = draws.key(lambda found: found[0] == "a" and found[-1] == "b" and len(found) == 2)
    diverging.recipes = draws.recipes(key)
    mixed = copy(run, tmp_path / "mixed")
    train(mixed, key)
    assert card_of(mixed)["recipe"] == "b"
    key = draws.key(lambda found: found == ["a"])
    diverging.recipes = ["a"]
    with pytest.raises(Diverged, match="Every trial of the search"):
        train(copy(run, tmp_path / "lost"), key)


def test_weights_that_are_not_finite_have_no_score(finished):
    from fedemb.data.client_data import UserStore
    from fedemb.evaluation.selection import score
    from fedemb.runtime.private_inputs import open_private

    model = load_backbone(finished.root / "model" / "backbone.keras", finished.config.model)
    with open_private(finished.context(), "evaluation") as folder:
        sound = score(UserStore(folder), finished.config, model)
        weights = model.weights[-1]
        weights.assign(np.full(weights.shape, np.nan))
        assert score(UserStore(folder), finished.config, model) is None
    assert 0 <= sound <= 1


@pytest.mark.long
def test_poisson_law_may_draw_no_trial(tmp_path):
    settings = searched(classifier_config, law="poisson", mean=1.5, **HEAD)
    run = prepare(tmp_path / "run", settings, users=60)
    key = Draws.of(run, tmp_path / "draws").key(lambda found: not found)
    with pytest.raises(Refused, match="ended without a model"):
        train(run, key)
    assert not (run.root / "model").exists()


def test_half_that_scores_is_not_the_half_that_is_measured(finished):
    from fedemb.data.client_data import UserStore
    from fedemb.evaluation.held_out import apply_models
    from fedemb.models.inference import embed
    from fedemb.runtime.private_inputs import open_private

    plain = finished.config.tuned("slow")
    model = load_backbone(finished.root / "model" / "backbone.keras", finished.config.model)
    with open_private(finished.context(), "evaluation") as folder:
        store = UserStore(folder)
        halves = [
            set(apply_models(store, {"m": model}, finished.config, embed, scoring=s)[0].users)
            for s in (False, True)
        ]
        everyone = set(apply_models(store, {"m": model}, plain, embed)[0].users)
    assert halves[0]
    assert halves[1]
    assert not halves[0] & halves[1]
    assert halves[0] | halves[1] == everyone
