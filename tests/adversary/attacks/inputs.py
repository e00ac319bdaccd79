"""Attacks by inputs of a user, or of a person who writes into a user's folders."""

from __future__ import annotations

import contextlib
import io
import os
import random
import socket
import stat
import unicodedata
from pathlib import Path

from fedemb.data.image_files import ImageFiles
from fedemb.data.photos import BadImageError
from fedemb.errors import FedEmbError
from fedemb.foundation import files
from fedemb.foundation.addresses import split_address
from fedemb.keys import open_key_store
from fedemb.pipelines import output
from fedemb.pipelines.run.load_config import load_config
from fedemb.storage import open_store
from tests.adversary.attacks.kind import Attack, Kind, World, attempted

SECRET = "TOPSECRET"


# ---- credentials in addresses --------------------------------------------------------------------


def _address(world: World, draw: random.Random) -> Attack:
    scheme = draw.choice(["s3", "gs", "gsm", "http", "https", "S3", "Gs"])
    place = draw.choice(["bucket", "b.example", "127.0.0.1", "[::1]", "büro"])
    user = draw.choice(["AKIAKEY", "", "a%40b", "k/v", "ü", "key:more"])
    path = draw.choice(["", "/", "/x", "/a/b.parquet", "/../x", "/%2e%2e/x"])
    name = draw.choice(["X-Amz-Signature", "X-Goog-Signature", "Signature", "sig", "token"])
    form = draw.choice(["password", "user", "query"])
    start = {
        "password": f"{scheme}://{user}:{SECRET}@{place}{path}",
        "user": f"{scheme}://{SECRET}@{place}{path}",
        "query": f"{scheme}://{place}{path}?{name}={SECRET}",
    }[form]
    parse = draw.choice([split_address, open_store, open_key_store])

    def act() -> str:
        try:
            parse(start)
        except FedEmbError as error:
            shown = output.escaped(error)
            return f"the secret is in the error {shown}" if SECRET in str(error) + shown else ""
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "the address was taken"

    return Attack(f"{parse.__name__} of {start}", act)


# ---- outputs -------------------------------------------------------------------------------------

OBJECTS = ("device", "fifo", "socket", "link to a file", "link to nothing", "link to a device")


def make_object(path: Path, what: str, outside: Path) -> None:
    outside.write_bytes(b"precious")
    if what == "fifo":
        os.mkfifo(path)
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            here = os.open(path.parent, os.O_RDONLY)
            made.bind(
                f"/proc/self/fd/{here}/socket"
            )  # a long path cannot be the address of a socket
            os.close(here)
        path.with_name("socket").rename(path)
    elif what == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        except PermissionError:
            os.mkfifo(path)
    else:
        to = {"link to a file": outside, "link to nothing": outside.with_name("nothing")}
        path.symlink_to(to.get(what, Path("/dev/null")))


def _output(world: World, draw: random.Random) -> Attack:
    what = draw.choice(OBJECTS)
    name = draw.choice(["e.parquet", "model.json", "x" * 200, "with space", "ü.jsonl", ".hidden"])
    way = draw.choice(["write_bytes", "create_bytes", "new_file", "open_log", "require_output"])

    def write(path: Path) -> None:
        if way == "new_file":
            with files.new_file(path) as file:
                file.write(b"ours")
        elif way == "open_log":
            with files.open_log(path) as file:
                file.write(b"ours")
        elif way == "require_output":
            files.require_output(path)
        else:
            getattr(files, way)(path, b"ours")

    def act() -> str:
        folder = world.fresh()
        path, outside = folder / name, folder / "outside"
        make_object(path, what, outside)
        before = path.lstat()
        problem = attempted(lambda: write(path), "the output was taken")
        if problem and not (way == "create_bytes" and problem.startswith("FileExistsError")):
            return problem
        after = path.lstat()
        if (before.st_ino, before.st_mode) != (after.st_ino, after.st_mode):
            return f"the {what} was replaced"
        return "" if outside.read_bytes() == b"precious" else "a file outside was written"

    return Attack(f"{way} to a {what} named {name}", act)


# ---- text of others ------------------------------------------------------------------------------

PIECES = (
    *("\r", "\n", "\x1b[2J", "\x1b]0;title\x07", "\x1b[1A", "\x9b2J", "\u202e", "\u2066", "\u200b"),
    *("\x08" * 9, "\x00", "\x7f", "\u2028", "\u2029", "\ufeff", "\U000e0001", "\x0c", "\x85"),
)


def _terminal(world: World, draw: random.Random) -> Attack:
    pieces = [draw.choice(PIECES) for _ in range(draw.randrange(1, 4))]
    words = ["verified", "alike: 1.000", "ü", "s3://KEY:" + SECRET + "@bucket/x"]
    text = "".join(draw.choice(words) + piece for piece in pieces) + "end"
    way = draw.choice([output.say, output.say_json, output.say_block])

    def act() -> str:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            way([text] if way is output.say_json else text)
        lines = shown.getvalue().removesuffix("\n")
        allowed = 1 + (text.count("\n") if way is output.say_block else 0)
        allowed += 2 if way is output.say_json else 0
        if lines.count("\n") + 1 > allowed:
            return "a line was added"
        seen = {unicodedata.category(letter) for letter in lines if letter != "\n"}
        if seen & {"Cc", "Cf", "Cs", "Zl", "Zp"}:
            return "a control character was printed"
        return ""

    return Attack(f"{way.__name__} of {text!r}", act)


# ---- configurations ------------------------------------------------------------------------------


def _configuration(world: World, draw: random.Random) -> Attack:
    many = draw.choice([3, 60, 2000, 30_000])
    key = draw.choice(["policy", "mechanism", "data", "storage", "a"])
    values = ["nan", ".inf", "-1", "1e400", "0", "''", "[]", "{}", "!!python/name:os.system"]
    texts = {
        "key twice": f"{key}: {{}}\n{key}: {{}}",
        "deep lists": f"{key}: " + "[" * many + "]" * many,
        "deep maps": f"{key}: " + "{a: " * many + "}" * many,
        "alias": f"{key}: &x [1]\nb: *x",
        "unknown section": f"{key}x: {draw.choice(values)}",
        "unknown field": f"{key}: {{unknown_{many}: {draw.choice(values)}}}",
        "wrong value": f"mechanism: {{noise_multiplier: {draw.choice(values)}, rounds: 3}}",
        "wrong delta": f"policy: {{delta: {draw.choice(values)}}}",
        "tab": f"{key}:\n\t- {many}",
        "nul": f"{key}: \x00{many}",
        "number as section": f"{key}: {many}",
    }
    name = draw.choice(sorted(texts))

    def act() -> str:
        path = world.fresh() / "run.yaml"
        path.write_text(texts[name])
        return attempted(lambda: load_config(path), lines=10)

    return Attack(f"{name}: {texts[name][:80]!r} ({many})", act)


# ---- keys and photos -----------------------------------------------------------------------------


def _key_mode(world: World, draw: random.Random) -> Attack:
    what = draw.choice(["file", "folder", "root"])
    bits = draw.choice([0o002, 0o003, 0o006, 0o007] if what != "file" else [0o4, 0o40, 0o44, 0o20])
    mode = (0o600 if what == "file" else 0o700) | bits | draw.choice([0, 0o010, 0o040, 0o070])
    kind = draw.choice(["policy", "reservation", "signing"])

    def act() -> str:
        root = world.fresh() / "keys"
        keys = open_key_store(str(root))
        keys.create(f"{kind}/one")
        (path,) = [item for item in root.rglob("one") if item.is_file()]
        {"file": path, "folder": path.parent, "root": root}[what].chmod(mode)
        return attempted(lambda: keys.fetch(f"{kind}/one"), "the key was read")

    return Attack(f"{what} of {kind} with mode {mode:04o}", act)


def _photo(world: World, draw: random.Random) -> Attack:
    what = draw.choice([*OBJECTS, "30 GB", "folder", "outside by name"])
    name = draw.choice(["a.png", "film.jpg", "ü.png", "x" * 150 + ".png"])

    def act() -> str:
        root = world.fresh() / "in"
        (root / "ada").mkdir(parents=True)
        path = root / "ada" / name
        asked = f"ada/{name}"
        if what == "30 GB":
            path.write_bytes(b"\xff\xd8\xff")
            os.truncate(path, 30 << 30)
        elif what == "folder":
            path.mkdir()
        elif what == "outside by name":
            (root.parent / "outside").write_bytes(b"precious")
            asked = f"ada/../../outside{'' if len(name) < 9 else '/'}"
        else:
            make_object(path, what, root.parent / "outside")
        try:
            ImageFiles(str(root), of_users=True).read(asked)
        except (BadImageError, FedEmbError):
            return ""
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "it was read"

    return Attack(f"{what} as {name}", act)


KINDS = (
    Kind("credentials in addresses", _address, 60),
    Kind("outputs to devices, pipes and links", _output, 60),
    Kind("control characters in names", _terminal, 50),
    Kind("hostile configurations", _configuration, 40),
    Kind("keys that others may change or read", _key_mode, 20),
    Kind("files that are not photos of a user", _photo, 20),
)
