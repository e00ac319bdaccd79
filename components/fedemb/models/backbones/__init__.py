"""Backbones: image to embedding, normalised by groups or not at all, and never by batch.

Those of the embedding paper are layer for layer its code's (arXiv 2211.10844,
`dp_visual_embeddings/models`), with the parameter counts pinned by a test. A backbone maps float32
images `[batch, height, width, channels]` in [-1, 1] to embeddings `[batch, embedding_dim]`, not
normalised; unit length is put on where embeddings are compared (`embed`).

A new one is one new module here that registers a function (`registry.backbone`).
"""

from fedemb.models.backbones.build import build_backbone as build_backbone
from fedemb.models.backbones.build import check_backbone as check_backbone
from fedemb.models.backbones.build import with_bfloat16 as with_bfloat16
from fedemb.models.backbones.groups import cut as cut
from fedemb.models.backbones.groups import trainable_variables as trainable_variables
from fedemb.models.backbones.registry import backbone as backbone
from fedemb.models.backbones.registry import backbones as backbones
