"""Bugs of the rounds on JAX, of devices and of hosts."""

from __future__ import annotations

from tests.planted_bugs.mutants.places import CLIP, EMBEDDING, ROUNDS, UNIT, one

STEPS = f"{EMBEDDING}/jax_rounds.py"
LOCAL = f"{EMBEDDING}/jax_local_training.py"
CLIENTS = "tests/components/embedding/test_embedding_jax_clients.py"
UNITS = "tests/components/embedding/test_embedding_jax_units.py"
TRAINING = "tests/components/train_dp_fedemb"
TOGETHER = (
    f"{TRAINING}/test_train_hosts.py::test_two_processes_give_the_bits_of_one[classification]"
)

MUTANTS = (
    one(
        10,
        "what_fills_a_batch_is_learned_from_on_jax",
        (LOCAL, "            offset + jnp.arange(size) < count,\n", "            chosen >= 0,\n"),
        CLIENTS,
    ),
    one(
        10,
        "clients_train_as_long_as_the_largest_on_jax",
        (
            f"{EMBEDDING}/jax_client_rounds.py",
            "examples[place], classes[place] = len(data.rows), len(data.head)",
            "examples[place], classes[place] = most, len(data.head)",
        ),
        CLIENTS,
    ),
    one(
        6,
        "one_seed_for_all_clients",
        (
            ROUNDS,
            "seed=seed_of(self.seed, round_index, client.grouping, client.group)",
            "seed=seed_of(self.seed, round_index, client.grouping, 0)",
        ),
        CLIENTS,
    ),
    one(
        6,
        "one_seed_for_all_rounds",
        (
            UNIT,
            "seed = seed_of(self.seed, round_index, unit.grouping, unit.group)",
            "seed = seed_of(self.seed, 0, unit.grouping, unit.group)",
        ),
        UNITS,
    ),
    one(
        1,
        "clip_in_32_bits_on_jax",
        (CLIP, 'ops.cast(t, "float64"), (-1,)', 'ops.cast(t, "float32"), (-1,)'),
        UNITS,
    ),
    one(
        1,
        "devices_are_added_up_in_floats",
        (
            STEPS,
            "            return total + jax.lax.psum(jnp.sum(mine, axis=0), _UNITS)\n",
            '            mine = jnp.sum(mine, axis=0).astype("float32")\n'
            "            return total + jax.lax.psum(mine, _UNITS).astype(part.dtype)\n",
        ),
        UNITS,
    ),
    one(
        3,
        "gradients_of_all_devices_are_one_record",
        (
            STEPS,
            "self._records(on_each_device(broadcast), units, clip)",
            "self._records(broadcast, units, clip)",
        ),
        UNITS,
    ),
    one(
        10,
        "each_device_counts_the_earlier_steps",
        (
            STEPS,
            "            return total + jax.lax.psum(jnp.sum(mine, axis=0), _UNITS)\n",
            "            return jax.lax.psum(total + jnp.sum(mine, axis=0), _UNITS)\n",
        ),
        UNITS,
    ),
    one(
        7,
        "kernels_that_give_other_bits_again",
        (
            "components/fedemb/backend.py",
            "--xla_gpu_deterministic_ops=true",
            "--xla_gpu_deterministic_ops=false",
        ),
        f"{UNITS}::test_a_gpu_is_told_to_give_the_same_bits_again",
    ),
    one(
        7,
        "backend_is_not_among_the_inputs",
        (
            "components/fedemb/documents/artifacts.py",
            '    return json_digest(config.model_dump(mode="json", exclude=left_out))',
            '    tree = config.model_dump(mode="json", exclude=left_out)\n'
            '    return json_digest({**tree, "training": {**tree["training"], "backend": None}})',
        ),
        "tests/pipelines/test_resume.py::test_another_backend_is_another_configuration",
    ),
    one(
        7,
        "a_plan_may_name_the_other_backend",
        (
            "components/fedemb/privacy/planning/plan_document.py",
            "if document.backend != config.training.backend:",
            "if document.backend is None:",
        ),
        "tests/components/gate/test_gate_rules.py::"
        "test_plan_and_report_name_the_backend_that_was_configured",
    ),
    one(
        10,
        "a_host_adds_units_of_its_own",
        (
            STEPS,
            "                    given = step._make(hosts.parts_of(body, step))\n",
            "                    given = step\n",
        ),
        TOGETHER,
    ),
    one(
        7,
        "a_host_keeps_the_weights_of_the_first_round",
        (
            STEPS,
            "                    state = self._begun(weights, np.float64(clip))\n",
            "                    first = state[1] if state else None\n"
            "                    state = self._begun(weights, np.float64(clip))\n"
            "                    state = state[0], first or state[1]\n",
        ),
        TOGETHER,
    ),
    one(
        7,
        "a_host_of_other_code_computes",
        (
            "components/fedemb/training/hosts.py",
            'if code_digest(config) != described["code_sha"]:',
            'if not described["code_sha"]:',
        ),
        f"{TRAINING}/test_train_hosts.py::test_a_host_of_other_code_refuses_to_compute",
    ),
)
