"""What Megatron-LM is told: the plugin's fields under its names, and the environment."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import Processes

from bigmodel import Accelerator, MissingPackageError, TrainingError
from bigmodel.utils import MegatronLMPlugin


def test_fields_become_arguments_of_megatron_lm() -> None:
    plugin = MegatronLMPlugin(tp_degree=2, pp_degree=4, sequence_parallelism=True, gradient_clipping=0.5, num_micro_batches=8, lr_mult=2.0)
    arguments = plugin.megatron_lm_default_args
    assert arguments["tensor_model_parallel_size"] == 2
    assert arguments["pipeline_model_parallel_size"] == 4
    assert arguments["sequence_parallel"] is True
    assert arguments["clip_grad"] == 0.5
    assert arguments["num_micro_batches"] == 8
    assert arguments["lr_mult"] == 2.0
    assert arguments["context_parallel_size"] == 1
    assert arguments["DDP_impl"] == "local"
    assert MegatronLMPlugin().megatron_lm_default_args["DDP_impl"] == "torch"
    assert {"tp_degree", "pp_degree", "gradient_clipping"}.isdisjoint(arguments)


def test_the_environment_says_what_arguments_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, word in {
        "TP_DEGREE": "2",
        "PP_DEGREE": "2",
        "GRADIENT_CLIPPING": "0.25",
        "SEQUENCE_PARALLELISM": "true",
        "RECOMPUTE_GRANULARITY": "selective",
        "USE_ROTARY_POSITION_EMBEDDINGS": "false",
        "DECODER_LAST_PIPELINE_NUM_LAYERS": "3",
    }.items():
        monkeypatch.setenv(f"MEGATRON_LM_{name}", word)
    plugin = MegatronLMPlugin(pp_degree=1)
    assert (plugin.tp_degree, plugin.pp_degree, plugin.gradient_clipping, plugin.sequence_parallelism) == (2, 1, 0.25, True)
    assert (plugin.recompute_granularity, plugin.use_rotary_position_embeddings) == ("selective", False)
    assert plugin.decoder_last_pipeline_num_layers == 3
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "two")
    with pytest.raises(TrainingError, match=r"MEGATRON_LM_TP_DEGREE is 'two', not a number"):
        MegatronLMPlugin()


def test_other_arguments_count_before_fields() -> None:
    plugin = MegatronLMPlugin(gradient_clipping=1.0, other_megatron_args={"clip_grad": 0.1, "swiglu": True})
    assert plugin.megatron_lm_default_args["clip_grad"] == 0.1
    assert plugin.megatron_lm_default_args["swiglu"] is True


def test_logging_is_switched_on_as_a_whole() -> None:
    assert "log_params_norm" not in MegatronLMPlugin(tensorboard_dir="logs").megatron_lm_default_args
    arguments = MegatronLMPlugin(tensorboard_dir="logs", set_all_logging_options=True).megatron_lm_default_args
    assert arguments["tensorboard_dir"] == "logs"
    assert arguments["log_params_norm"] is True


@pytest.mark.parametrize(
    ("precision", "found", "averaging"),
    [("no", (False, False), "torch"), ("fp16", (True, False), "torch"), ("bf16", (False, True), "local")],
)
def test_the_precision_is_an_argument(precision: str, found: tuple[bool, bool], averaging: str) -> None:
    plugin = MegatronLMPlugin()
    plugin.set_mixed_precision(precision)
    arguments = plugin.megatron_lm_default_args
    assert (arguments.get("fp16", False), arguments.get("bf16", False)) == found
    assert plugin.DDP_impl == arguments["DDP_impl"] == averaging


def test_consumed_samples_are_those_of_three_data_sets() -> None:
    assert MegatronLMPlugin(consumed_samples=[5]).consumed_samples == [5, 0, 0]
    assert MegatronLMPlugin(consumed_samples=[5, 6, 7]).megatron_lm_default_args["consumed_samples"] == [5, 6, 7]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"tp_degree=0: at least 1"):
        MegatronLMPlugin(tp_degree=0)
    with pytest.raises(TrainingError, match=r"recompute_granularity='all'"):
        MegatronLMPlugin(recompute_granularity="all")


@pytest.mark.parametrize(
    ("fields", "story"),
    [
        ({"pp_degree": 2}, r"pp_degree=2: megatron-core's pipelines send between CUDA devices\. Share layers with tp_degree"),
        ({"sequence_parallelism": True}, r"sequence_parallelism=True: .*Transformer Engine's, for CUDA devices"),
        ({"recompute_activations": True, "recompute_num_layers": 2}, r"recompute_num_layers=2: layers are computed again one by one"),
        ({"use_distributed_optimizer": True}, r"use_distributed_optimizer=True: .*CUDA devices.*FullyShardedDataParallelPlugin"),
        ({"use_precision_aware_optimizer": True}, r"use_precision_aware_optimizer=True: .*Use one of torch's"),
        ({"optimizer_cpu_offload": True}, r"optimizer_cpu_offload=True: .*CUDA streams.*cpu_offload=True"),
        ({"overlap_cpu_optimizer_d2h_h2d": True}, r"overlap_cpu_optimizer_d2h_h2d=True: .*CUDA streams"),
        ({"use_custom_fsdp": True}, r"use_custom_fsdp=True: .*CUDA streams.*FullyShardedDataParallelPlugin"),
        ({"context_parallel_size": 2}, r"context_parallel_size=2: .*CUDA devices"),
        ({"expert_model_parallel_size": 2}, r"expert_model_parallel_size=2: models with experts are not built"),
        ({"train_samples": 100}, r"train_samples=100: schedules count steps\. Use train_iters"),
        ({"consumed_samples": [8]}, r"consumed_samples=\[8, 0, 0\]: .*skip_first_batches"),
        ({"megatron_dataset_flag": True}, r"megatron_dataset_flag=True: data comes from torch's loaders"),
        ({"no_wd_decay_cond": len}, r"no_wd_decay_cond=.*groups of parameters, with a weight_decay each"),
        ({"tensorboard_dir": "logs"}, r"tensorboard_dir='logs': use Accelerator\(log_with='tensorboard'"),
        ({"custom_loss_function": len}, r"custom_loss_function=.*compute a loss from the logits"),
        ({"other_megatron_args": {"swiglu": True}}, r"other_megatron_args \['swiglu'\].*plugin.transformer_config"),
        ({"tp_degree": 2, "hidden_dropout": 0.1}, r"hidden_dropout=0\.1 and tp_degree=2: .*random states.*Set both to 0"),
    ],
)
def test_what_the_training_step_does_not_do_is_refused_by_name(fields: dict[str, Any], story: str) -> None:
    with pytest.raises(TrainingError, match=rf"megatron_lm_plugin with .*{story}"):
        Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**fields))
    assert Accelerator(cpu=True).num_processes == 1  # nothing is left of it


def test_settings_of_the_accelerator_that_do_not_go_with_it_are_refused() -> None:
    with pytest.raises(TrainingError, match=r"mixed_precision='fp16': .*scaler of losses.*CUDA devices\. Use 'bf16'"):
        Accelerator(cpu=True, mixed_precision="fp16", megatron_lm_plugin=MegatronLMPlugin())
    with pytest.raises(TrainingError, match=r"backend 'INDUCTOR': megatron-core's layers are not compiled"):
        Accelerator(cpu=True, dynamo_backend="inductor", megatron_lm_plugin=MegatronLMPlugin())


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    for use in (
        MegatronLMPlugin().initialize_model_parallel,
        MegatronLMPlugin().layer_specification,
        lambda: MegatronLMPlugin().transformer_config(num_layers=1),
        lambda: Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin()),
    ):
        with pytest.raises(MissingPackageError, match=r"pip install 'bigmodel\[megatron\]'"):
            use()
    assert not torch.distributed.is_initialized()


def groups_and_config() -> dict[str, Any]:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    with pytest.raises(TrainingError, match=r"2 processes are no multiple of 4.*tp_degree 2 x pp_degree 2"):
        MegatronLMPlugin(tp_degree=2, pp_degree=2).initialize_model_parallel()
    plugin = MegatronLMPlugin(tp_degree=2, sequence_parallelism=True, hidden_dropout=0.1)
    plugin.set_mixed_precision("bf16")
    plugin.initialize_model_parallel()
    config = plugin.transformer_config(num_layers=2, hidden_size=32, num_attention_heads=4, attention_dropout=0.2)
    with pytest.raises(TrainingError, match=r"TransformerConfig has no hidden_sizes"):
        plugin.transformer_config(num_layers=2, hidden_sizes=32)
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    # The layer norms of Transformer Engine, for accelerators, take parts of sequences; torch's do not.
    whole = plugin.transformer_config(num_layers=2, hidden_size=32, num_attention_heads=4, sequence_parallel=False)
    model = GPTModel(config=whole, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16)
    shape = tuple(model.decoder.layers[0].mlp.linear_fc1.weight.shape)
    parallel_state.destroy_model_parallel()
    names = (
        "tensor_model_parallel_size",
        "sequence_parallel",
        "hidden_dropout",
        "attention_dropout",
        "params_dtype",
        "recompute_granularity",
    )
    return {name: getattr(config, name) for name in names} | {"shape": shape}


@pytest.mark.xdist_group("processes")
@pytest.mark.filterwarnings("ignore")
def test_megatron_core_shares_a_model_as_the_plugin_says(processes: Callable[[int], Processes]) -> None:
    pytest.importorskip("megatron.core")
    for found in processes(2).run(groups_and_config, timeout=120):
        assert found == {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.2,
            "params_dtype": torch.bfloat16,
            "recompute_granularity": None,
            "shape": (64, 32),  # half of the 128 rows
        }
