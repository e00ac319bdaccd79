"""Every kind of document, and the JSON schema of each: what sweeps go over."""

import ast
import importlib
import inspect
import itertools
import pkgutil
from collections.abc import Iterator
from textwrap import dedent
from typing import Any, cast

import fedemb.documents as package
from fedemb.foundation.document import Document, Part


def json_schema(document: type[Document]) -> dict[str, Any]:
    """The JSON schema of a document, for those who read it elsewhere."""
    schema = document.model_json_schema()
    schema["properties"]["schema"] = {"const": document.schema_name()}
    schema["required"] = sorted([*schema["required"], "schema"])
    if document.role is not None or document.kind == "ledger_record":
        text = {"type": "string", "maxLength": 256}
        names = ["algorithm", "key_id", "value"]
        schema["properties"]["signature"] = {
            "type": "object",
            "properties": dict.fromkeys(names, text),
            "required": names,
            "additionalProperties": False,
        }
        schema["required"] = sorted([*schema["required"], "signature"])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def all_documents() -> Iterator[type[Document]]:
    """Every kind of document, in order of its name; imports the modules that hold them."""
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    importlib.import_module("fedemb.models.backbone_files")
    yield from sorted(Document.__subclasses__(), key=lambda item: item.kind)


def field_texts(part: type[Part]) -> dict[str, str]:
    """Returns the string below each field, which documents do not read at run time."""
    found: dict[str, str] = {}
    for owner in reversed(part.__mro__):
        if owner.__module__.startswith("fedemb."):
            body = cast("ast.ClassDef", ast.parse(dedent(inspect.getsource(owner))).body[0]).body
            for field, text in itertools.pairwise(body):
                match field, text:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str(words))),
                    ):
                        found[name] = inspect.cleandoc(words)
    return {name: text for name, text in found.items() if name in part.model_fields}
