"""Backbones: image to embedding, with group normalisation or none, never batch normalisation.

The backbones of the embedding paper match its code layer for layer (arXiv 2211.10844,
`dp_visual_embeddings/models`); a test pins their parameter counts. A backbone maps float32 images
`[batch, height, width, channels]` in [-1, 1] to embeddings `[batch, embedding_dim]`, not
normalised; `embed` scales embeddings to unit length for comparison.
"""

from fedemb.models.backbones.build import build_backbone as build_backbone
from fedemb.models.backbones.build import check_backbone as check_backbone
from fedemb.models.backbones.build import with_bfloat16 as with_bfloat16
from fedemb.models.backbones.groups import cut as cut
from fedemb.models.backbones.groups import trainable_variables as trainable_variables
