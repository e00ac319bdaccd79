"""Evidence, collected during training, that the priced mechanism is the one that runs.

The audit reads committed records, reads keys while they exist, and runs two rounds again. It does
not affect training: a run releases the same bits with or without it.
"""

# SciPy ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import copy
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict, cast

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from scipy import special

from fedemb.config import ServerConfig
from fedemb.documents.audit import REPLAYED, SIGMAS, Fold, MechanismAudit, Receipts, Replay
from fedemb.documents.model import RoundLine
from fedemb.errors import ArtifactError
from fedemb.foundation.canonical_json import JsonObject, sha256_hex
from fedemb.keys import derive
from fedemb.privacy.group_mechanisms import TreeAggregation
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.privacy.noise import (
    Floats,
    TagChain,
    TreeStream,
    gaussian,
    round_tag,
    run_key,
    tensor_key,
)
from fedemb.privacy.running import Mechanism, RoundState, with_tags
from fedemb.privacy.sampling import Index, VirtualClient
from fedemb.storage import Store
from fedemb.training.rounds import TrainingRound, Unit
from fedemb.training.server import STATE_ARRAYS, ServerState, pack, released_weights, unpack


@dataclass(frozen=True)
class AttemptKeys:
    """Root key and identity of an attempt, while the root key exists."""

    root_key: bytes
    run_id: str
    attempt: int
    inputs_sha: str

    def key(self, purpose: str) -> bytes:
        """Returns the attempt's key of `noise` or `coins`."""
        return run_key(self.root_key, purpose, self.run_id, self.attempt, self.inputs_sha)

    @property
    def noise_key(self) -> bytes:
        """Key of the attempt's `KeyedNoise`."""
        return self.key("noise")

    def chosen_rounds(self, rounds: int) -> list[int]:
        """Returns the rounds to replay; they are unknown without the key."""
        words = derive(self.root_key, "replay", self.run_id, str(self.attempt))
        random = np.random.default_rng(list(words))
        return sorted(random.permutation(rounds)[:REPLAYED].tolist())


# Noise receipts: regression of a round's output on its noise, redrawn from key and tag.
#
# An output S + N, with N drawn independently of S with standard deviation s in each of d
# coordinates, has slope 1 on N, up to about |S| / (s d). Noise that was discarded, scaled, drawn
# under another key or scaled with the sum gives another slope for every data set. If sums are so
# large that the slope is inaccurate (few weights, or a round of all users), replayed rounds give
# exact evidence (`audit.py`).


_DIGITS = 1e-5
"""Tolerance for committed means, which are float32."""
BLOCK = 1024
"""Weights whose noise is compared with its planned variance together, over all rounds."""
FALSE_ALARM = 2e-9
"""Probability that noise with the planned variance fails, in all blocks together."""
SAMPLED = 64
"""Normals of a replayed round that are computed in another way."""
_DOUBLES = 1e-12
"""Largest difference of the two ways; 3e-15 was measured, an angle of 32 bits gives 1e-9."""


class ReceiptFigures(TypedDict):
    """Saved figures of the receipts so far. Raw."""

    rounds: int
    failed: int
    noise: float
    both: float
    rest: float
    size: int
    blocks: list[float]
    """Sum of squares / planned variance, of each block."""


class NoiseReceipts:
    """Receipts of the rounds so far.

    Args:
      plan: plan of the run; its `noise_multiplier` is used unchanged.
      noise_key: `noise.run_key(root, "noise", ...)`.
      tags: tags of earlier rounds, if rounds share noise.
    """

    def __init__(self, plan: MechanismPlan, noise_key: bytes, tags: Sequence[bytes] = ()):
        self._plan, self._key = plan, noise_key
        self._stream: TreeStream | None = None
        self._before = list(tags)
        self.figures = ReceiptFigures(
            rounds=0, failed=0, noise=0.0, both=0.0, rest=0.0, size=0, blocks=[]
        )
        """Figures of the rounds so far. Raw."""

    def add(self, mean: np.ndarray, tag: bytes) -> float:
        """Adds a round and returns its slope. Raw.

        Args:
          mean: committed mean, `[dim]`.
          tag: tag of its noise.
        """
        output = mean.astype(np.float64) * (self._plan.normalizer / self._plan.l2_norm_clip)
        known = self._known(tag, output.size)
        noise = self.drawn(tag, output.size) - known
        output -= known
        energy, both = float(noise @ noise), float(output @ noise)
        slope = both / energy
        rest = float(np.sum(np.square(output - slope * noise)))
        so_far = self.figures
        so_far["rounds"] += 1
        # Written so that NaN fails.
        tolerance = SIGMAS * math.sqrt(rest / output.size / energy) + _DIGITS
        so_far["failed"] += not abs(slope - 1) <= tolerance
        so_far["noise"] += energy
        so_far["both"] += both
        so_far["rest"] += rest * energy / output.size
        self._count(noise)
        return slope

    def _count(self, noise: Floats) -> None:
        """Adds the squares of a round's noise, or of its difference from a control variate."""
        variance = self._plan.noise_multiplier**2 * (2.0 if self._stream else 1.0)
        squares = np.add.reduceat(np.square(noise), np.arange(0, noise.size, BLOCK)) / variance
        before = self.figures["blocks"] or [0.0] * len(squares)
        self.figures["blocks"] = (squares + before).tolist()
        self.figures["size"] = noise.size

    def _scaled(self) -> bool:
        """Returns whether the sums of squares are those of as many standard normals.

        They have a chi-squared distribution, which is exact for every number of weights.
        """
        size, found = self.figures["size"], np.array(self.figures["blocks"])
        counts = np.minimum(BLOCK, size - BLOCK * np.arange(len(found))) * self.figures["rounds"]
        counts, found = np.append(counts, counts.sum()), np.append(found, found.sum())
        tails = np.minimum(special.chdtr(counts, found), special.chdtrc(counts, found))
        return bool((2 * tails * len(tails) >= FALSE_ALARM).all())  # NaN fails

    def drawn(self, tag: bytes, size: int) -> Floats:
        """Redraws the noise of the next round on the sum / clip."""
        key = tensor_key(self._key, tag, "update")
        if stream := self._begin(size):
            return self._row(stream, key)
        return gaussian(key, size) * self._plan.noise_multiplier

    def _known(self, tag: bytes, size: int) -> Floats | float:
        """Returns a control variate if rounds share noise, else 0.

        The sums of a round may depend on the noise of earlier rounds, part of which is in this
        round. Noise with the same earlier part and another fresh part is subtracted from both sides
        of the regression; the difference is independent of the sums.
        """
        stream = copy.deepcopy(self._begin(size))
        return self._row(stream, tensor_key(self._key, tag, "another")) if stream else 0.0

    def _begin(self, size: int) -> TreeStream | None:
        if self._stream is None and isinstance(self._plan, TreeAggregation):
            self._stream = TreeStream(self._plan, size)
            for earlier in self._before:
                self._stream.next(tensor_key(self._key, earlier, "update"))
        return self._stream

    def _row(self, stream: TreeStream, key: bytes) -> Floats:
        return stream.next(key) / 2.0**self._plan.grid_bits

    @property
    def found(self) -> Receipts:
        """Returns the result of the rounds so far."""
        so_far, together = self.figures, False
        if so_far["noise"] > 0:
            tolerance = SIGMAS * math.sqrt(so_far["rest"]) / so_far["noise"] + _DIGITS
            together = abs(so_far["both"] / so_far["noise"] - 1) <= tolerance
        return Receipts(
            rounds=so_far["rounds"],
            failed=so_far["failed"],
            together=together,
            normals=so_far["rounds"] * so_far["size"],
            scaled=self._scaled(),
        )


def normal_by_quantile(key: bytes, size: int, place: int) -> float:
    """Returns one of the normals of `noise.gaussian(key, size)`, from the bits of the cipher.

    The radius comes from the quantile function of the chi-squared distribution, and the angle from
    functions of degrees: a fault in the generator is not repeated here.
    """
    block, at = divmod(place, 1 << 16)
    pairs = (min(1 << 16, size - (block << 16)) + 1) // 2
    nonce = bytes(4) + (1).to_bytes(4, "little") + block.to_bytes(8, "little")
    stream = (
        Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor().update(bytes(24 * pairs))
    )
    places = (8 * (row * pairs + at % pairs) for row in range(3))
    high, low, angle = (int.from_bytes(stream[start : start + 8], "little") for start in places)
    radius = math.sqrt(special.chdtri(2.0, ((high << 64) + low + 1) / 2**128))
    turned = special.cosdg if at < pairs else special.sindg
    return radius * float(turned(360.0 * (angle / 2**64)))


# Repeats a recorded round without one of its users, and checks that the rest is unchanged.


@dataclass(frozen=True, kw_only=True)
class RoundReplay:
    """Repeats one round from its initial weights; the mechanism is rewound to before the round."""

    function: TrainingRound
    mechanism: Mechanism
    load: Callable[[VirtualClient], Unit]
    number: int
    weights: np.ndarray
    mean: np.ndarray
    receipts: NoiseReceipts
    noise_key: bytes

    def problems(self, index: Index, after: RoundState) -> set[str]:
        """Returns the codes of failed checks.

        Args:
          index: the users.
          after: mechanism state in the round's record.
        """
        clients = self.mechanism.sample_clients(self.number, index)
        failed, total = self._without_one(index, clients)
        tag = bytes.fromhex(after["tag"])
        if round_tag(self.noise_key, self.number, total) != tag:
            failed.add("sum")
        if not self._holds(total, tag):
            failed.add("noise")
        key, size = tensor_key(self.noise_key, tag, "update"), total.size
        drawn, places = gaussian(key, size), {secrets.randbelow(size) for _ in range(SAMPLED)}
        if not all(abs(drawn[at] - normal_by_quantile(key, size, at)) <= _DOUBLES for at in places):
            failed.add("generator")
        return failed

    def _without_one(
        self, index: Index, clients: list[VirtualClient]
    ) -> tuple[set[str], np.ndarray]:
        """Returns failed checks without one of the users, and the sum with the user added back.

        If images are sampled independently, all images of the user are removed at once, and the
        contribution of each is added back separately, because each is clipped separately.
        """
        members = np.sort(np.concatenate([np.zeros(0, np.int64), *(c.users for c in clients)]))
        if not len(members):
            return set(), self._sum(clients)
        mechanism, failed = self.mechanism, set[str]()
        removed = int(members[len(members) // 2])
        mine = [client for client in clients if removed in client.users]
        wanted = [_less(client, removed) for client in clients]
        apart = _Without(index, removed)
        left = [apart.named(c) for c in mechanism.sample_clients(self.number, apart)]
        apiece = len({client.grouping for client in mine}) == len(mine)
        few = len(mine) <= mechanism.plan.user_contributions
        if not apiece or not few or _names(left) != _names(wanted):
            failed.add("coins")
        total = self._sum(left)
        grid = 2.0**mechanism.plan.grid_bits
        for one in mine:
            # Other clients are empty but keep their index, which selects the worker.
            there = [client if client is one else _no_client(client) for client in clients]
            gone = [_less(client, removed) for client in there]
            with_them, without = self._sum(there), self._sum(gone)
            for record in (with_them, without):
                if not np.linalg.norm(record.astype(np.float64)) <= grid:
                    failed.add("clip")
            total = total + with_them - without
        return failed, total

    def _holds(self, total: np.ndarray, tag: bytes) -> bool:
        """Returns whether the committed mean is sum plus noise, up to float32 rounding."""
        mechanism = self.mechanism
        plan = mechanism.plan
        output = total / 2.0**plan.grid_bits + self.receipts.drawn(tag, total.size)
        output *= plan.l2_norm_clip / plan.normalizer
        return bool(np.abs(self.mean - output).max() <= 1e-6 * np.abs(output).max())

    def _sum(self, clients: list[VirtualClient]) -> np.ndarray:
        slabs = self.function.slabs(map(self.load, clients), self.number)
        return np.asarray(self.function.run(self.weights, slabs).total, np.int64)


class _Without:
    """Index of all users except one, with consecutive row numbers."""

    def __init__(self, index: Index, removed: int):
        self._index, self._removed = index, removed
        self.virtual_clients, self.groupings = index.virtual_clients, index.groupings
        self.user_count = index.user_count - 1

    @property
    def user_keys(self) -> np.ndarray:
        """Returns the keys of the remaining users."""
        return np.delete(self._index.user_keys, self._removed)

    def members(self, grouping: int, group: int) -> np.ndarray:
        """Returns the rows among the remaining users."""
        rows = self._index.members(grouping, group)
        rows = rows[rows != self._removed]
        return rows - (rows > self._removed)

    def named(self, client: VirtualClient) -> VirtualClient:
        """Returns the client with row numbers of the store."""
        rows = client.users + (client.users >= self._removed)
        return VirtualClient(client.grouping, client.group, rows)


def _no_client(client: VirtualClient) -> VirtualClient:
    return VirtualClient(client.grouping, client.group, client.users[:0])


def _less(client: VirtualClient, removed: int) -> VirtualClient:
    rows = client.users[client.users != removed]
    return VirtualClient(client.grouping, client.group, rows)


def _names(clients: list[VirtualClient]) -> dict[tuple[int, int], list[int]]:
    """Users of each virtual client; empty clients contribute nothing and can be left out."""
    return {
        (client.grouping, client.group): np.sort(client.users).tolist()
        for client in clients
        if len(client.users)
    }


_NAME = "audit.npz"
_BEFORE = "began"
"""Array of the weights before each replayed round; the name is part of the stored state."""


@dataclass(frozen=True)
class RoundRecord:
    """One committed round. Noised."""

    public: RoundLine
    """Line of the round in `rounds.jsonl`."""
    mechanism_state: RoundState
    """`Mechanism.round_state()` after the round."""
    tags_sha: str | None
    """Digest of the tags of all rounds up to it, see `TagChain`; None: rounds are independent."""
    mean: np.ndarray | None
    """float32 `[dim]`, noised mean update; None once a checkpoint covers it."""

    @property
    def index(self) -> int:
        """Number of the round, from 0."""
        return self.public.round


class _Head(TypedDict):
    """Saved state of an audit, without its arrays."""

    inputs_sha: str
    rounds: int
    began: list[int]
    """Replayed rounds that started; the name is part of the stored state."""
    named: bool
    size: int
    receipts: ReceiptFigures


class RoundAudit:
    """Collects receipts, fold, tags, and the initial weights of two rounds.

    Args:
      plan: plan of the run.
      keys: keys of the attempt.
      server: configuration of the server step.
      advance: server step on a noised mean.
      start: server state before round 0.
    """

    def __init__(
        self,
        plan: MechanismPlan,
        keys: AttemptKeys,
        server: ServerConfig,
        advance: Callable[[ServerConfig, ServerState, np.ndarray], ServerState],
        start: ServerState,
    ):
        self._plan, self._keys, self._server, self._advance = plan, keys, server, advance
        self._state = start
        self._receipts = NoiseReceipts(plan, keys.noise_key)
        self._chain = TagChain()
        self._size = 0
        self._named = True
        """Whether every public digest matches the committed mean."""
        self._chosen = keys.chosen_rounds(plan.rounds)
        self._before: dict[int, np.ndarray] = {}
        self._means: dict[int, np.ndarray] = {}
        self._replay = Replay(rounds=0, failed=[])

    @property
    def rounds(self) -> int:
        """Returns the number of audited rounds."""
        return self._state.rounds

    def add(self, record: RoundRecord) -> float:
        """Adds the next committed round; returns the slope of its noise. Raw.

        Args:
          record: record of the round, with its mean.
        """
        mean, state = record.mean, record.mechanism_state
        assert mean is not None, f"round {record.index} was audited before"
        if record.index in self._chosen:
            self._before[record.index] = self._state.weights
            self._means[record.index] = mean
        self._chain.append(bytes.fromhex(state["tag"]))
        self._chain.check(record.tags_sha)
        self._size = mean.size
        slope = self._receipts.add(mean, self._chain.tags[-1])
        self._named &= record.public.output_sha == sha256_hex(mean.tobytes())
        self._state = self._advance(self._server, self._state, mean)
        return slope

    def _shared(self, rounds: int) -> list[bytes]:
        """Returns the tags of the first rounds if later noise depends on them, else none."""
        return self._chain.tags[:rounds] if self._plan.tracks_participation else []

    def replay(
        self,
        function: TrainingRound,
        mechanism: Mechanism,
        index: Index,
        load: Callable[[VirtualClient], Unit],
        read: Callable[[int], RoundRecord | None],
    ) -> None:
        """Replays the chosen rounds, each with one of its users removed.

        The sum without the user, corrected by the difference of the user's virtual client with and
        without the user, must match the keyed digest in the round's record. Then the coins were the
        same, and no other record depended on the user. The committed mean must be that sum plus its
        noise.

        Args:
          function: rounds of the training.
          mechanism: mechanism of the training; it is rewound.
          index: the users.
          load: reads the examples of a virtual client.
          read: reads the record of a round.
        """
        failed: set[str] = set()
        chosen = [number for number in self._chosen if number in self._before]
        for number in chosen:
            tags = self._shared(number)
            before = _record(read, number - 1).mechanism_state if number else None
            mechanism.rewind(before and with_tags(before, tags))
            one = RoundReplay(
                function=function,
                mechanism=mechanism,
                load=load,
                number=number,
                weights=self._before[number],
                mean=self._means[number],
                receipts=NoiseReceipts(self._plan, self._keys.noise_key, tags),
                noise_key=self._keys.noise_key,
            )
            failed |= one.problems(index, _record(read, number).mechanism_state)
        self._replay = Replay(rounds=len(chosen), failed=sorted(failed))

    def found(self, released: np.ndarray) -> MechanismAudit:
        """Returns all evidence of a finished training, after `replay`.

        Args:
          released: released weights, float32 `[dim]`.
        """
        folded = released_weights(self._server, self._state)
        same = np.array_equal(folded[: released.size], released)
        return MechanismAudit(
            receipts=self._receipts.found,
            fold=Fold(rounds=self.rounds, same=same and self._named),
            replay=self._replay,
        )

    def evidence(self, released: np.ndarray) -> JsonObject:
        """Returns fields of the model card, see `found`."""
        return {"mechanism_audit": self.found(released).model_dump(mode="json")}

    def save(self, store: Store) -> None:
        """Writes the state, before the trainer writes its checkpoint."""
        head: _Head = {
            "inputs_sha": self._keys.inputs_sha,
            "rounds": self.rounds,
            "began": list(self._before),
            "named": self._named,
            "size": self._size,
            "receipts": self._receipts.figures,
        }
        kept = {
            _BEFORE: np.array(list(self._before.values()), np.float32),
            "means": np.array(list(self._means.values()), np.float32),
            "tags": np.frombuffer(b"".join(self._chain.tags), np.uint8),
        }
        store.write(_NAME, pack(head, kept | self._state.arrays))

    def restore(self, store: Store, read: Callable[[int], RoundRecord | None]) -> None:
        """Resumes from the last state saved by a trainer of the same attempt, or starts.

        Args:
          store: working state of the attempt.
          read: reads the record of a round. If rounds share noise, the last audited record has a
            digest of the tags of all rounds.

        Raises:
          ArtifactError: the state is damaged or belongs to other inputs.
        """
        try:
            data = store.read(_NAME)
        except FileNotFoundError:
            return
        try:
            packed, arrays = unpack(data, _BEFORE, "means", "tags", *STATE_ARRAYS)
            head = cast("_Head", packed)
            tags = arrays.pop("tags").reshape(head["rounds"], -1)
            before, means = arrays.pop(_BEFORE), arrays.pop("means")
            self._before = dict(zip(head["began"], before, strict=True))
            self._means = dict(zip(head["began"], means, strict=True))
        except (ValueError, KeyError) as error:
            raise ArtifactError(
                "The state of the audit cannot be read. Restore the working state of the run from "
                "a backup, or start a run with a new id."
            ) from error
        if head["inputs_sha"] != self._keys.inputs_sha:
            raise ArtifactError(
                "The state of the audit belongs to other inputs. Start a run with a new id."
            )
        self._chain, self._size = TagChain(row.tobytes() for row in tags), head["size"]
        self._state = ServerState(**arrays, rounds=head["rounds"])
        self._named = head["named"]
        if self.rounds:
            self._chain.check(_record(read, self.rounds - 1).tags_sha)
        before = self._shared(self.rounds)
        self._receipts = NoiseReceipts(self._plan, self._keys.noise_key, before)
        self._receipts.figures = head["receipts"]


def _record(read: Callable[[int], RoundRecord | None], number: int) -> RoundRecord:
    """Returns the record of a committed round; raises ArtifactError if it is gone."""
    record = read(number)
    if record is None:
        raise ArtifactError(
            f"The record of round {number}, which was committed, is gone. Restore the working "
            "state of the run from a backup."
        )
    return record
