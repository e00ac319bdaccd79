"""A public start without pretraining: any bytes as weights, signed as pretrain_public signs."""

from fedemb.documents.artifacts import file_digest, write_bytes
from fedemb.documents.model import Pretrained
from fedemb.keys.signatures import Signer, write_signed
from fedemb.step_context import StepContext


def sign_start(context: StepContext) -> None:
    """Says of the weights in `pretrained`, made up if there are none, that they fit the run."""
    folder, config = context.artifacts.pretrained, context.config
    if not (folder / "backbone.keras").exists():
        write_bytes(folder / "backbone.keras", b"weights")
    fields = {
        "pretraining_kind": config.pretraining.kind,
        "weights_sha": file_digest(folder / "backbone.keras"),
        "model": config.model.model_dump(mode="json"),
        "images": 0,
        "classes": 0,
        "final_loss": None,
        "trainings": [],
        "seed": config.training.seed,
    }
    signer = Signer.newest(context.keys, str(Pretrained.role))
    write_signed(folder / "pretrained.json", Pretrained.of_fields(fields), signer)
