"""The words that the training side chooses between; each equals its value as a string, so scripts may compare and pass either."""

from __future__ import annotations

from enum import Enum, EnumMeta

__all__ = [
    "ComputeEnvironment",
    "DDPCommunicationHookType",
    "DistributedType",
    "DynamoBackend",
    "LoggerType",
    "PrecisionType",
    "RNGType",
    "SageMakerDistributedType",
]


class _ValuesAreIn(EnumMeta):
    def __contains__(cls, item: object) -> bool:
        try:
            cls(item)
        except ValueError:
            return False
        return True


class WordEnum(str, Enum, metaclass=_ValuesAreIn):
    """A choice of words: `"bf16" in PrecisionType`, `PrecisionType("bf16") == "bf16"`, `str(PrecisionType.BF16) == "bf16"`."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """Every value, in the order of definition."""
        return [str(member.value) for member in cls]


class NamedWordEnum(WordEnum):
    """Words that are printed with their class: `str(DistributedType.NO) == "DistributedType.NO"`, and yet `DistributedType.NO == "NO"`."""

    __str__ = Enum.__str__


class DistributedType(NamedWordEnum):
    """How processes work together; `MULTI_…` names the kind of device that each of them drives."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"


class ComputeEnvironment(NamedWordEnum):
    """Where a job runs."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class SageMakerDistributedType(NamedWordEnum):
    """How a job on Amazon SageMaker is spread."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class DynamoBackend(WordEnum):
    """What compiles the graphs that `torch.compile` finds; `NO` compiles nothing. See <https://pytorch.org/docs/stable/torch.compiler.html>."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


class LoggerType(WordEnum):
    """Experiment trackers; `ALL` means every one whose library is installed."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class PrecisionType(WordEnum):
    """The floating-point format that forwards compute in; parameters and gradients stay as they are."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class RNGType(WordEnum):
    """A random number generator whose state is kept, restored or made equal on all processes; `GENERATOR` is one that the user made."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


class DDPCommunicationHookType(WordEnum):
    """How DistributedDataParallel compresses gradients on their way, see `torch.distributed.algorithms.ddp_comm_hooks`."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"
