"""The model card: Markdown with a metadata header, from the report and nothing else."""

from __future__ import annotations

import json
from typing import Any

from fedemb.config import RunConfig


def model_card(config: RunConfig, report: dict[str, Any], name: str, version: str) -> str:
    """Writes the card of a release.

    Args:
      config: configuration of the run.
      report: signed privacy report.
      name: name of the release.
      version: version of the release.
    """
    accounting, cumulative = report["accounting"], report["cumulative"]
    header = {
        "name": name,
        "version": version,
        "library_name": "keras",
        "pipeline_tag": "image-feature-extraction",
        "license": config.pretraining.licence,
        "tags": ["differential-privacy", "user-level", "embedding"],
        "epsilon": accounting["epsilon"],
        "delta": accounting["delta"],
        "privacy_unit": "user",
        "cumulative_epsilon": cumulative["max_block_epsilon"],
        "epsilon_cap": cumulative["cap"],
        "audit_level": report["setting"]["recurring"]["audit_level"],
        "model_sha": report["model_sha"],
        "config_sha": report["provenance"]["config_sha"],
    }
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in header.items()), "---", ""]
    model = config.model
    lines += [
        f"# {name} {version}",
        "",
        f"Image embeddings of length {model.embedding_dim} from a `{model.backbone}` backbone, for "
        f"images of {model.image_size} x {model.image_size} pixels, {model.channels} channel"
        f"{'s' if model.channels > 1 else ''}. Trained with user-level differential privacy.",
        "",
        "## Privacy",
        "",
        f"This model carries {report['guarantee']['sentence']}.",
        "",
        f"With all earlier runs of policy `{cumulative['policy_id']}`, no user block has spent "
        f"more than epsilon {cumulative['max_block_epsilon']:.4g} of its cap "
        f"{cumulative['cap']:g}.",
        "",
        "Assumptions:",
        "",
        *(f"- {line}" for line in report["assumptions"]),
        "",
        "Limitations:",
        "",
        *(f"- {line}" for line in report["limitations"]),
        "",
        f"Audit: {report['audit']['sentence']}",
        *(
            line
            for item in report["approvals"]
            for line in ("", f"Waived by {item['actor']}: `{item['code']}`, {item['reason']}")
        ),
        "",
        "## Utility",
        "",
        str(report["utility"]["sentence"]),
        "",
        "Embeddings of different releases do not compare: the space of this one is "
        f"`{str(report['utility']['embedding_space_id'])[:16]}`. Embed stored images again after "
        "an upgrade.",
        "",
        "## Use",
        "",
        "```python",
        "import tensorflow as tf",
        'model = tf.saved_model.load("saved_model").signatures["serving_default"]',
        'embeddings = model(images=tf.constant([open("image.png", "rb").read()]))["embeddings"]',
        "```",
        "",
        "## Public start",
        "",
        f"{config.pretraining.kind}; {config.pretraining.provenance or 'no public data'}; licence: "
        f"{config.pretraining.licence}; overlap with private images: "
        f"{report['pretraining']['overlaps_private']}.",
        "",
        "## Verify",
        "",
        "```",
        "fedemb verify . --trust trust.json",
        "```",
        "",
        "`trust.json` comes from the data owner. A key inside a bundle proves nothing.",
        "",
    ]
    return "\n".join(lines)
