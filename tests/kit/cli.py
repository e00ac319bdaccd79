"""The command line as a user meets it, and a key as `ssh-keygen` makes it."""

import contextlib
import io
import subprocess
from pathlib import Path

from typer.testing import CliRunner

from fedemb.pipelines.cli.main import app, main


def fedemb(*words: object) -> str:
    """Output of a command that ends well; its own errors are raised."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def ended(*words: object) -> tuple[int, str, str]:
    """Exit code, output and errors of a command, as the program ends it."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(word) for word in words])
        except SystemExit as stopped:
            code = int(stopped.code or 0)
    return code, out.getvalue(), err.getvalue()


def ssh_key(folder: Path, who: str) -> Path:
    """The private key of a person; its public half lies beside it."""
    path = folder / who
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", who, "-f", str(path)]
    subprocess.run(command, check=True)
    return path
