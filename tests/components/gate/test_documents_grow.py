"""A document gains a field: the later version is signed, released and verified; old ones stay.

The verdict represents all documents, which one class reads. `LaterVerdict` is the class of a later
package.
"""

import json
from typing import Annotated, ClassVar

import pytest

from fedemb.documents.verdict import VerdictDocument
from fedemb.errors import ArtifactError, LaterVersion
from fedemb.foundation.document import Since, encode, parse
from fedemb.keys.signatures import Signer, sign_document
from fedemb.steps.gate_release import gate
from fedemb.steps.release_model import release, verify
from tests.kit.pipeline_runs import honest_run


class LaterVerdict(VerdictDocument):
    """The verdict with one more field."""

    newest: ClassVar[int] = 3
    rules_asked: Annotated[int | None, Since(3, before=None)]


@pytest.fixture(scope="module")
def allowed(tmp_path_factory):
    run = honest_run.start(tmp_path_factory.mktemp("grow") / "run").until_gate()
    run.do_gate()
    return run


@pytest.fixture
def run(allowed, tmp_path):
    return honest_run.copy_of(allowed, tmp_path / "run")


@pytest.fixture
def later_package(monkeypatch):
    for module in (release, verify):
        monkeypatch.setattr(module, "VerdictDocument", LaterVerdict)


def _later(run, **fields):
    """The run's verdict with other fields, as a later gate signs it."""
    written = json.loads(run.verdict.read_text())
    del written["signature"]
    content = {**written, "schema": "fedemb/verdict/3", "rules_asked": 16, **fields}
    return encode(sign_document(content, Signer.newest(run.keys, "gate")))


def test_old_document_is_released_and_verified_by_a_later_package(run, later_package):
    old = parse(run.verdict.read_bytes(), LaterVerdict, "verdict.json")
    assert (old.version, old.body.rules_asked) == (2, None)
    run.ledger().chain.trust.check(old)  # its signature covers what it said then
    run.do_release()
    assert run.problems() == []


def test_later_document_is_written_signed_released_and_verified(run, later_package, monkeypatch):
    made = gate._document

    def later(*words):
        return LaterVerdict.of_fields({**made(*words).model_dump(mode="json"), "rules_asked": 16})

    monkeypatch.setattr(gate, "_document", later)
    assert run.do_gate()["rules_asked"] == 16
    written = parse(run.verdict.read_bytes(), LaterVerdict, "verdict.json")
    assert (written.version, written.body.rules_asked) == (3, 16)
    run.do_release()
    assert run.problems() == []


def test_package_of_today_says_that_a_later_document_is_later(run):
    with pytest.raises(LaterVersion, match=r"'fedemb/verdict/3', expected fedemb/verdict/1 to 2"):
        parse(_later(run), VerdictDocument, "verdict.json")
    other = _later(run).replace(b"fedemb/verdict/3", b"fedemb/model/3")
    with pytest.raises(ArtifactError) as found:
        parse(other, VerdictDocument, "verdict.json")
    assert not isinstance(found.value, LaterVersion)
    run.verdict.write_bytes(_later(run))
    with pytest.raises(ArtifactError, match="with this version of the package"):
        run.do_release()


@pytest.mark.parametrize(
    "fields", [{"schema": "fedemb/verdict/2"}, {"rules_asked": "16"}, {"rules_missed": 0}], ids=str
)
def test_field_of_another_version_or_of_none_is_refused_even_signed(run, fields):
    with pytest.raises(ArtifactError):
        parse(_later(run, **fields), LaterVerdict, "verdict.json")


def test_later_document_without_its_field_is_refused(run):
    content = json.loads(_later(run))
    del content["rules_asked"], content["signature"]
    data = encode(sign_document(content, Signer.newest(run.keys, "gate")))
    with pytest.raises(ArtifactError, match="rules_asked"):
        parse(data, LaterVerdict, "verdict.json")
