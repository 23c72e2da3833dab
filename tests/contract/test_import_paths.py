"""Every name is importable under the path that scripts use, with the parameters and defaults that they rely on."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

from bigmodel.training.config_file import DEFAULT_CONFIG_FILE

REQUIRED = inspect.Parameter.empty

TOP = """init_empty_weights init_on_device cpu_offload cpu_offload_with_hook disk_offload dispatch_model load_checkpoint_and_dispatch
    load_checkpoint_in_model infer_auto_device_map"""
BIG_MODELING = """init_empty_weights init_on_device cpu_offload cpu_offload_with_hook disk_offload dispatch_model
    load_checkpoint_and_dispatch load_checkpoint_in_model infer_auto_device_map check_device_map attach_layerwise_casting_hooks"""
MODELING = """CustomDtype align_module_device calculate_maximum_sizes check_device_map check_device_same check_tied_parameters_in_config
    check_tied_parameters_on_same_device clean_device_map compute_module_sizes compute_module_total_buffer_size
    convert_file_size_to_int dtype_byte_size fallback_allocate find_tied_parameters get_balanced_memory get_max_layer_size
    get_max_memory get_module_leaves get_module_size_with_ties get_non_persistent_buffers get_state_dict_from_offload
    get_state_dict_offloaded_model has_offloaded_params id_tensor_storage infer_auto_device_map load_checkpoint_in_model
    load_offloaded_weights load_state_dict named_module_tensors retie_parameters set_module_tensor_to_device"""
OFFLOAD = """OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict load_offloaded_weight offload_state_dict
    offload_weight save_offload_index"""
CONSTANTS = """MODEL_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME WEIGHTS_INDEX_NAME
    WEIGHTS_NAME WEIGHTS_PATTERN_NAME OPTIMIZER_NAME SCHEDULER_NAME SAMPLER_NAME SCALER_NAME RNG_STATE_NAME"""
UTILS = """CustomDtype align_module_device calculate_maximum_sizes check_device_map check_tied_parameters_in_config
    check_tied_parameters_on_same_device clear_device_cache compute_module_sizes convert_file_size_to_int dtype_byte_size
    find_device find_tied_parameters get_balanced_memory get_max_layer_size get_max_memory has_offloaded_params id_tensor_storage
    infer_auto_device_map is_namedtuple load_checkpoint_in_model load_offloaded_weights load_state_dict named_module_tensors
    retie_parameters send_to_device set_module_tensor_to_device"""
OPERATIONS = """CannotPadNestedTensorWarning ConvertOutputsToFp32 DistributedOperationException GatheredParameters TensorInformation
    broadcast broadcast_object_list concatenate convert_outputs_to_fp32 convert_to_fp32 copy_tensor_to_devices find_batch_size
    find_device gather gather_object get_data_structure get_shape honor_type ignorant_find_batch_size initialize_tensors
    is_namedtuple is_tensor_information is_torch_tensor listify pad_across_processes pad_input_tensors recursively_apply
    reduce send_to_device slice_tensors"""
HOOKS = """AlignDevicesHook CpuOffload LayerwiseCastingHook ModelHook SequentialHook UserCpuOffloadHook add_hook_to_module
    attach_align_device_hook attach_align_device_hook_on_blocks attach_execution_device_hook remove_hook_from_module
    remove_hook_from_submodules"""

DATACLASSES = """AutocastKwargs ComputeEnvironment DDPCommunicationHookType DataLoaderConfiguration DistributedDataParallelKwargs
    DistributedType DynamoBackend GradScalerKwargs GradientAccumulationPlugin InitProcessGroupKwargs KwargsHandler LoggerType
    PrecisionType ProfileKwargs ProjectConfiguration RNGType SageMakerDistributedType TorchDynamoPlugin"""
ENVIRONMENT = """clear_environment convert_dict_to_env_variables get_int_from_env override_numa_affinity parse_choice_from_env
    parse_flag_from_env patch_environment purge_accelerate_environment set_numa_affinity str_to_bool"""
IMPORTS = """is_bf16_available is_bnb_available is_cuda_available is_deepspeed_available is_mps_available is_npu_available
    is_tensorboard_available is_torch_xla_available is_transformers_available is_wandb_available is_xpu_available"""
RANDOM = "set_seed synchronize_rng_state synchronize_rng_states"
MEMORY = "clear_device_cache find_executable_batch_size release_memory should_reduce_batch_size"
OTHER = """check_os_kernel compile_regions convert_bytes extract_model_from_parallel get_free_port get_module_children_bottom_up
    has_compiled_regions is_compiled_module is_port_in_use load merge_dicts recursive_getattr save wait_for_everyone
    write_basic_config"""
VERSIONS = "compare_versions is_torch_version"

PATHS = {
    "bigmodel": f"{TOP} ParallelismConfig PartialState debug_launcher find_executable_batch_size notebook_launcher synchronize_rng_states",
    "bigmodel.big_modeling": BIG_MODELING,
    "bigmodel.hooks": f"{HOOKS} PrefixedDataset find_device named_module_tensors send_to_device set_module_tensor_to_device",
    "bigmodel.commands.config.default": "write_basic_config",
    "bigmodel.launchers": "debug_launcher notebook_launcher",
    "bigmodel.parallelism_config": "ParallelismConfig",
    "bigmodel.state": "AcceleratorState DistributedType GradientState PartialState",
    "bigmodel.utils": f"{UTILS} {OFFLOAD} {CONSTANTS} {ENVIRONMENT} {IMPORTS} {RANDOM} {MEMORY} {OTHER} {VERSIONS} {OPERATIONS}",
    "bigmodel.utils.constants": f"{CONSTANTS} SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING",
    "bigmodel.utils.dataclasses": DATACLASSES,
    "bigmodel.utils.environment": ENVIRONMENT,
    "bigmodel.utils.imports": IMPORTS,
    "bigmodel.utils.memory": MEMORY,
    "bigmodel.utils.modeling": f"{MODELING} get_grad_scaler get_mixed_precision_context_manager",
    "bigmodel.utils.offload": OFFLOAD,
    "bigmodel.utils.operations": OPERATIONS,
    "bigmodel.utils.other": OTHER,
    "bigmodel.utils.random": RANDOM,
    "bigmodel.utils.torch_xla": "install_xla",
    "bigmodel.utils.versions": VERSIONS,
}


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in PATHS.items() for name in names.split()])
def test_name_is_importable(path, name):
    module = importlib.import_module(path)
    assert hasattr(module, name)
    assert path == "bigmodel.big_modeling" or name in module.__all__


@pytest.mark.parametrize("path", sorted(PATHS))
def test_everything_in_all_exists(path):
    module = importlib.import_module(path)
    assert all(hasattr(module, name) for name in module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)


def test_one_function_has_one_object_under_all_paths():
    found: dict[str, set[int]] = {}
    for path, names in PATHS.items():
        for name in names.split():
            found.setdefault(name, set()).add(id(getattr(importlib.import_module(path), name)))
    assert {name for name, objects in found.items() if len(objects) > 1} == set()


SIGNATURES = {
    "init_empty_weights": {"include_buffers": None},
    "init_on_device": {"device": REQUIRED, "include_buffers": None},
    "cpu_offload": {
        "model": REQUIRED,
        "execution_device": None,
        "offload_buffers": False,
        "state_dict": None,
        "preload_module_classes": None,
    },
    "cpu_offload_with_hook": {"model": REQUIRED, "execution_device": None, "prev_module_hook": None},
    "disk_offload": {
        "model": REQUIRED,
        "offload_dir": REQUIRED,
        "execution_device": None,
        "offload_buffers": False,
        "preload_module_classes": None,
    },
    "dispatch_model": {
        "model": REQUIRED,
        "device_map": REQUIRED,
        "main_device": None,
        "state_dict": None,
        "offload_dir": None,
        "offload_index": None,
        "offload_buffers": False,
        "skip_keys": None,
        "preload_module_classes": None,
        "force_hooks": False,
    },
    "load_checkpoint_and_dispatch": {
        "model": REQUIRED,
        "checkpoint": REQUIRED,
        "device_map": None,
        "max_memory": None,
        "no_split_module_classes": None,
        "offload_folder": None,
        "offload_buffers": False,
        "dtype": None,
        "offload_state_dict": None,
        "skip_keys": None,
        "preload_module_classes": None,
        "force_hooks": False,
        "strict": False,
        "full_state_dict": True,
        "broadcast_from_rank0": False,
    },
    "big_modeling.attach_layerwise_casting_hooks": {
        "module": REQUIRED,
        "storage_dtype": REQUIRED,
        "compute_dtype": REQUIRED,
        "skip_modules_pattern": None,
        "skip_modules_classes": None,
        "non_blocking": False,
    },
    "utils.convert_file_size_to_int": {"size": REQUIRED},
    "utils.dtype_byte_size": {"dtype": REQUIRED},
    "utils.id_tensor_storage": {"tensor": REQUIRED},
    "utils.compute_module_sizes": {"model": REQUIRED, "dtype": None, "special_dtypes": None, "buffers_only": False},
    "utils.modeling.compute_module_total_buffer_size": {"model": REQUIRED, "dtype": None, "special_dtypes": None},
    "utils.get_max_layer_size": {"modules": REQUIRED, "module_sizes": REQUIRED, "no_split_module_classes": REQUIRED},
    "utils.calculate_maximum_sizes": {"model": REQUIRED},
    "utils.modeling.get_module_leaves": {"module_sizes": REQUIRED},
    "utils.modeling.check_device_same": {"first_device": REQUIRED, "second_device": REQUIRED},
    "utils.get_max_memory": {"max_memory": None},
    "utils.get_balanced_memory": {
        "model": REQUIRED,
        "max_memory": None,
        "no_split_module_classes": None,
        "dtype": None,
        "special_dtypes": None,
        "low_zero": False,
    },
    "utils.modeling.clean_device_map": {"device_map": REQUIRED, "module_name": ""},
    "utils.check_device_map": {"model": REQUIRED, "device_map": REQUIRED},
    "utils.check_tied_parameters_in_config": {"model": REQUIRED},
    "utils.find_tied_parameters": {"model": REQUIRED, "kwargs": REQUIRED},
    "utils.retie_parameters": {"model": REQUIRED, "tied_params": REQUIRED},
    "utils.check_tied_parameters_on_same_device": {"tied_params": REQUIRED, "device_map": REQUIRED},
    "utils.modeling.get_module_size_with_ties": {
        "tied_params": REQUIRED,
        "module_size": REQUIRED,
        "module_sizes": REQUIRED,
        "modules_to_treat": REQUIRED,
    },
    "infer_auto_device_map": {
        "model": REQUIRED,
        "max_memory": None,
        "no_split_module_classes": None,
        "dtype": None,
        "special_dtypes": None,
        "verbose": False,
        "clean_result": True,
        "offload_buffers": False,
        "fallback_allocation": False,
    },
    "utils.modeling.fallback_allocate": {
        "modules": REQUIRED,
        "module_sizes": REQUIRED,
        "size_limit": REQUIRED,
        "no_split_module_classes": None,
        "tied_parameters": None,
    },
    "utils.set_module_tensor_to_device": {
        "module": REQUIRED,
        "tensor_name": REQUIRED,
        "device": REQUIRED,
        "value": None,
        "dtype": None,
        "fp16_statistics": None,
        "tied_params_map": None,
        "non_blocking": False,
        "clear_cache": True,
    },
    "utils.named_module_tensors": {
        "module": REQUIRED,
        "include_buffers": True,
        "recurse": False,
        "remove_non_persistent": False,
    },
    "utils.modeling.get_non_persistent_buffers": {"module": REQUIRED, "recurse": False, "fqns": False},
    "utils.load_state_dict": {"checkpoint_file": REQUIRED, "device_map": None},
    "load_checkpoint_in_model": {
        "model": REQUIRED,
        "checkpoint": REQUIRED,
        "device_map": None,
        "offload_folder": None,
        "dtype": None,
        "offload_state_dict": False,
        "offload_buffers": False,
        "keep_in_fp32_modules": None,
        "offload_8bit_bnb": False,
        "strict": False,
        "full_state_dict": True,
        "broadcast_from_rank0": False,
    },
    "utils.load_offloaded_weights": {"model": REQUIRED, "index": REQUIRED, "offload_folder": REQUIRED},
    "utils.modeling.get_state_dict_offloaded_model": {"model": REQUIRED},
    "utils.modeling.get_state_dict_from_offload": {
        "module": REQUIRED,
        "module_name": REQUIRED,
        "state_dict": REQUIRED,
        "device_to_put_offload": "cpu",
    },
    "utils.has_offloaded_params": {"module": REQUIRED},
    "utils.align_module_device": {"module": REQUIRED, "execution_device": None},
    "utils.send_to_device": {"tensor": REQUIRED, "device": REQUIRED, "non_blocking": False, "skip_keys": None},
    "utils.offload_weight": {"weight": REQUIRED, "weight_name": REQUIRED, "offload_folder": REQUIRED, "index": None},
    "utils.load_offloaded_weight": {"weight_file": REQUIRED, "weight_info": REQUIRED},
    "utils.save_offload_index": {"index": REQUIRED, "offload_folder": REQUIRED},
    "utils.offload_state_dict": {"save_dir": REQUIRED, "state_dict": REQUIRED},
    "utils.PrefixedDataset": {"dataset": REQUIRED, "prefix": REQUIRED},
    "utils.OffloadedWeightsLoader": {"state_dict": None, "save_folder": None, "index": None, "device": None},
    "utils.extract_submodules_state_dict": {"state_dict": REQUIRED, "submodule_names": REQUIRED},
    "hooks.add_hook_to_module": {"module": REQUIRED, "hook": REQUIRED, "append": False},
    "hooks.remove_hook_from_module": {"module": REQUIRED, "recurse": False},
    "hooks.remove_hook_from_submodules": {"module": REQUIRED},
    "hooks.AlignDevicesHook": {
        "execution_device": None,
        "offload": False,
        "io_same_device": False,
        "weights_map": None,
        "offload_buffers": False,
        "place_submodules": False,
        "skip_keys": None,
        "tied_params_map": None,
    },
    "hooks.attach_execution_device_hook": {
        "module": REQUIRED,
        "execution_device": REQUIRED,
        "skip_keys": None,
        "preload_module_classes": None,
        "tied_params_map": None,
    },
    "hooks.attach_align_device_hook": {
        "module": REQUIRED,
        "execution_device": None,
        "offload": False,
        "weights_map": None,
        "offload_buffers": False,
        "module_name": "",
        "skip_keys": None,
        "preload_module_classes": None,
        "tied_params_map": None,
    },
    "hooks.attach_align_device_hook_on_blocks": {
        "module": REQUIRED,
        "execution_device": None,
        "offload": False,
        "weights_map": None,
        "offload_buffers": False,
        "module_name": "",
        "skip_keys": None,
        "preload_module_classes": None,
        "tied_params_map": None,
    },
    "hooks.CpuOffload": {"execution_device": None, "prev_module_hook": None},
    "hooks.UserCpuOffloadHook": {"model": REQUIRED, "hook": REQUIRED},
    "hooks.SequentialHook": {"hooks": REQUIRED},
    "commands.config.default.write_basic_config": {"mixed_precision": "no", "save_location": DEFAULT_CONFIG_FILE},
    "find_executable_batch_size": {"function": None, "starting_batch_size": 128, "reduce_batch_size_fn": None},
    "synchronize_rng_states": {"rng_types": REQUIRED, "generator": None},
    "utils.clear_device_cache": {"garbage_collection": False},
    "utils.clear_environment": {},
    "utils.environment.override_numa_affinity": {"local_process_index": REQUIRED, "verbose": None},
    "utils.is_bf16_available": {"ignore_tpu": False},
    "utils.is_mps_available": {"min_version": "1.12"},
    "utils.is_npu_available": {"check_device": False},
    "utils.is_torch_version": {"operation": REQUIRED, "version": REQUIRED},
    "utils.is_torch_xla_available": {"check_is_tpu": False, "check_is_gpu": False},
    "utils.is_xpu_available": {"check_device": False},
    "utils.patch_environment": {"kwargs": REQUIRED},
    "utils.purge_accelerate_environment": {"func_or_cls": REQUIRED},
    "utils.set_numa_affinity": {"local_process_index": REQUIRED, "verbose": None},
    "utils.set_seed": {"seed": REQUIRED, "device_specific": False, "deterministic": False},
    "utils.synchronize_rng_state": {"rng_type": None, "generator": None},
    "utils.wait_for_everyone": {},
}


def resolve(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"bigmodel.{module}".rstrip(".")), name)


OWN_PARAMETERS = {
    "load_checkpoint_and_dispatch": {
        "quantization": None,
        "packed_cache": None,
        "mmap": False,
        "reading": "auto",
        "progress": None,
        "progress_callback": None,
    },
    "load_checkpoint_in_model": {"mmap": False, "reading": "auto", "progress": None, "progress_callback": None},
}
"""What bigmodel has added, by keyword only, so that no positional call of an old script means anything else."""


@pytest.mark.parametrize("path", SIGNATURES)
def test_parameters_keep_their_names_order_and_defaults(path):
    parameters = dict(inspect.signature(resolve(path)).parameters)
    for name, default in OWN_PARAMETERS.get(path, {}).items():
        added = parameters.pop(name)
        assert (added.kind, added.default) == (added.KEYWORD_ONLY, default)
    assert {name: parameter.default for name, parameter in parameters.items()} == SIGNATURES[path]
    assert list(parameters) == list(SIGNATURES[path])
    variable = [parameter.kind for parameter in parameters.values() if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD]
    assert not variable or path in ("hooks.SequentialHook", "utils.find_tied_parameters", "utils.patch_environment")


def test_layerwise_hook_takes_its_three_arguments_by_position():
    parameters = inspect.signature(resolve("hooks.LayerwiseCastingHook")).parameters
    assert list(parameters) == ["storage_dtype", "compute_dtype", "non_blocking"]


@pytest.mark.parametrize("method", ["init_hook", "pre_forward", "post_forward", "detach_hook"])
@pytest.mark.parametrize("kind", ["ModelHook", "SequentialHook", "AlignDevicesHook", "CpuOffload", "LayerwiseCastingHook"])
def test_hook_methods_take_what_hooks_take(kind, method):
    expected = {
        "init_hook": ["self", "module"],
        "pre_forward": ["self", "module", "args", "kwargs"],
        "post_forward": ["self", "module", "output"],
        "detach_hook": ["self", "module"],
    }[method]
    assert list(inspect.signature(getattr(resolve(f"hooks.{kind}"), method)).parameters) == expected


def test_importing_everything_leaves_the_compiler_out():
    code = (
        "import sys, bigmodel, bigmodel.utils, bigmodel.hooks, bigmodel.big_modeling\n"
        "assert 'torch._dynamo' not in sys.modules and 'transformers' not in sys.modules and 'bitsandbytes' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_old_module_names_resolve_to_what_dispatch_looks_up():
    from bigmodel import api, big_modeling

    assert big_modeling.check_device_map is api.check_device_map
    assert big_modeling is api


def test_modules_are_attributes_of_the_package_alone() -> None:
    program = "import bigmodel; print(bigmodel.utils.get_balanced_memory, bigmodel.hooks.ModelHook, bigmodel.big_modeling.cpu_offload)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_modules_that_are_imported_when_they_are_asked_for() -> None:
    later = {
        "accelerator": "Accelerator",
        "commands": "config.default.write_basic_config",
        "optimizer": "AcceleratedOptimizer",
        "parallelism_config": "ParallelismConfig",
        "scheduler": "AcceleratedScheduler",
        "tracking": "WandBTracker",
    }
    for module, name in later.items():  # each in a process of its own: one may import another
        program = (
            "import sys, bigmodel\n"
            f"assert 'bigmodel.{module}' not in sys.modules and {module!r} in dir(bigmodel)\n"
            f"bigmodel.{module}.{name}\n"
            f"assert bigmodel.{module} is sys.modules['bigmodel.{module}'] and dir(bigmodel).count({module!r}) == 1\n"
            "assert not hasattr(bigmodel, 'nothing')\n"
        )
        subprocess.run([sys.executable, "-c", program], check=True)
