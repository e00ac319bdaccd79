"""Shapes in signatures are checked in tests: a wrong one stops where it is passed on."""

import numpy as np
import pytest
from jaxtyping import TypeCheckError

from fedemb.evaluation.pairs import weighted_mean
from fedemb.models import losses
from fedemb.models.inference import embed
from fedemb.privacy.noise import heads


def test_wrong_shapes_and_types_are_refused():
    import tensorflow as tf

    head, labels = tf.zeros([3, 4]), tf.zeros([5], tf.int32)
    losses.softmax_loss(tf.zeros([5, 4]), head, labels)
    for wrong in (tf.zeros([5, 3]), tf.zeros([6, 4]), tf.zeros([5, 4], tf.float64)):
        with pytest.raises(TypeCheckError):
            losses.softmax_loss(wrong, head, labels)
    weights, units = np.ones((2, 3), np.float32), np.arange(3)
    assert weighted_mean(np.ones(3), units, weights).value == 1.0
    with pytest.raises(TypeCheckError):
        weighted_mean(np.ones(4), units, weights)
    assert heads(np.zeros(3, np.uint64), 0.5).all()
    with pytest.raises(TypeCheckError):
        heads(np.zeros((3, 1), np.uint64), 0.5)
    with pytest.raises(TypeCheckError):
        embed(None, np.zeros((2, 8, 8, 1), np.float32))
