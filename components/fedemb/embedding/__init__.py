"""The training engine: backbones, local training of virtual clients, rounds, baselines.

    backbone = build_backbone(ModelConfig(backbone="lenet"), seed=0)
    embeddings = embed(backbone, images)

TensorFlow is imported when a function is called, not when this package is.
"""

from components.fedemb.embedding.backbones import build_backbone as build_backbone
from components.fedemb.embedding.backbones import check_backbone as check_backbone
from components.fedemb.embedding.backbones import trainable_variables as trainable_variables
from components.fedemb.embedding.central import train_centralized as train_centralized
from components.fedemb.embedding.inference import embed as embed
from components.fedemb.embedding.loading import load_backbone as load_backbone
from components.fedemb.embedding.loading import save_backbone as save_backbone
from components.fedemb.embedding.preprocessing import decode_image as decode_image
from components.fedemb.embedding.preprocessing import preprocess as preprocess
from components.fedemb.embedding.rounds import ClientExamples as ClientExamples
from components.fedemb.embedding.rounds import RoundFunction as RoundFunction
from components.fedemb.embedding.rounds import RoundSums as RoundSums
from components.fedemb.embedding.rounds import assign_weights as assign_weights
from components.fedemb.embedding.server import initial_state as initial_state
from components.fedemb.embedding.server import released_weights as released_weights
from components.fedemb.embedding.server import server_step as server_step
from components.fedemb.embedding.threads import configure_threads as configure_threads
