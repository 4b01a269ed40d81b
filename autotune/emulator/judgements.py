"""Judgements about generated entry points: those for which plain success is a right answer, with the reason.

A generated entry point does nothing and returns success. That is right if nothing that the host
reads depends on it. A call of an entry point without a judgement is reported after the run.
"""

from __future__ import annotations

import re

REFUSES = re.compile(r"nvml")  # answered with NVML_ERROR_NOT_SUPPORTED, as cards answer much of it: always a right answer
SAYS = re.compile(r"(Get)?(Error|Status)(String|Name)$|LastErrorString$|GetErrorString")  # answered with an empty text
MAKES = re.compile(r"(cublas|cudnn|cusparse|cusolver|curand)\w*(Create|createDescr)(?!\w*Permutation)")
"""Answered with a fresh handle in the first argument."""

_MATH = r"(cublas|cublasLt|cudnn|cusparse|cusparseLt|cusolver\w*?|curand|cufft)"
_EITHER = r"cu(da)?"
_COMPUTES = "computes on the device"
_NO_PROFILE = "profiling, which finds no activity"
_SCALARS = r"(?!\w*(dot|nrm2|asum|amax|amin|rotm?g))"  # BLAS routines whose result may go to the host
_REASONS = {
    rf"({_MATH}|cupti|{_EITHER})\w*(Destroy|Unload|Finalize)\w*": "what it ends holds nothing",
    rf"{_MATH}\w*Set[A-Z]\w*": "a setting of a computation that is left out",
    rf"cublas([SDCZH]|[SDCZH]gemm){_SCALARS}[a-z]\w*": _COMPUTES,
    r"cublas(GemmEx|GemmBatchedEx|GemmStridedBatchedEx|GemmGroupedBatchedEx|LtMatmul|LtMatrixTransform)(_\w+)?": _COMPUTES,
    r"cusparse(SpMM|SpMV|SDDMM|SpSV|SpSM)(_solve|_preprocess)?": _COMPUTES,
    r"cufft(Exec|XtExec)\w*": _COMPUTES,
    r"cudnnBackend(Execute|Initialize|Finalize|SetAttribute)": "no engine was offered, so none runs",
    rf"{_EITHER}Logs(Register|Unregister)Callback": "the emulated driver writes no messages",
    r"cupti\w+": _NO_PROFILE,
    rf"{_EITHER}Profiler(Start|Stop)": _NO_PROFILE,
    rf"{_EITHER}(Func|Kernel)Set(Attribute\w*|CacheConfig|SharedMemConfig|BlockShape)": "a kernel that does not run",
    rf"{_EITHER}(Device|Ctx|DevicePrimaryCtx)Set(Limit|CacheConfig|SharedMemConfig|Flags|MemPool)(_v2)?": "without effect",
    rf"{_EITHER}(SetDeviceFlags|SetValidDevices|DeviceReset|CtxResetPersistingL2Cache)": "there is nothing to set",
    rf"{_EITHER}(Device|Ctx)(Enable|Disable)PeerAccess": "every card reaches every other",
    rf"{_EITHER}Mem(Advise|Prefetch\w*|RangePrefetch\w*)(_v2)?": "where managed memory lies is not followed",
    rf"{_EITHER}MemPool(SetAttribute|SetAccess|TrimTo)": "pools hold nothing back",
    r"cuDevicePrimaryCtx(Release|Reset)(_v2)?": "the context stays until the process ends",
    rf"{_EITHER}(Graph(Upload|Debug\w*|RetainUserObject|ReleaseUserObject)|UserObject(Retain|Release))": "a graph is only a name",
    rf"{_EITHER}Stream(SetAttribute|CopyAttributes|AttachMemAsync|UpdateCapture\w*)": "streams run nothing",
    rf"{_EITHER}IpcGetEventHandle": "an event of another process is always finished",
    rf"{_EITHER}Stream(WriteValue64|WaitValue32|WaitValue64)(_v2)?": "what it waits for is finished",
    r"cuMemcpy\w*Peer\w*|cu(da)?Memcpy(2D|3D)\w*": "values of large copies are left out",
    r"nccl(CommDeregister|CommRegister\w*|GroupSimulateEnd|RedOpDestroy|CommWindow\w*)": "buffers need no registration",
    r"__cuda\w+": "registration of what never runs",
}

RULES = tuple((re.compile(pattern), reason) for pattern, reason in _REASONS.items())  # patterns of whole names, with the reason


def judged(name: str) -> str | None:
    """Return the reason that success, or the refusal, is a right answer of this entry point; None
    without a judgement."""
    if REFUSES.match(name):
        return "not supported, as NVML says itself of much on many cards"
    if SAYS.search(name):
        return "a text for people"
    if MAKES.match(name):
        return "a handle of nothing"
    return next((reason for pattern, reason in RULES if pattern.fullmatch(name)), None)
