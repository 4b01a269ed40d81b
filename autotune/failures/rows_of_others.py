"""Texts of what is missing, unreachable, broken or waiting. Part of the table of failures, read behind refusals."""

from __future__ import annotations

from autotune.failures.table import Row, any_of

_NUMBERLESS = r"\b(?:NaNs?|non-?finite)\b"

_MISSING = (
    Row(
        # On a GPU the check of a sampler prints this, and what is raised names no more than the assertion.
        name="numeric_on_device",
        pattern=r"Assertion `?probability tensor contains either",
        kind="other",
        cause="numeric",
        said="anywhere",
        sure=True,
    ),
    Row(
        # What is looked up by a token's number, or counted by a label's, has no such place: on a CPU it is an IndexError.
        name="index_on_device",
        pattern=r"\bindexSelect\w*: .{0,80}Assertion `?srcIndex < srcSelectDimSize"
        r"|\bnll_loss\w*: .{0,80}Assertion `?t >= 0 && t < n_classes",
        kind="other",
        cause="data",
        said="anywhere",
        sure=True,
    ),
    Row(
        # Loops that end themselves print why, and raise nothing.
        name="numeric_and_stopped",
        pattern=r"\b(?:loss|grad\w*(?:[ _]norm)?) (?:is|was|became)(?: now)? (?:nan|inf\w*|not finite|non-?finite)\b.{0,40}"
        r"\b(?:stop|abort|exit|terminat|quit|end)\w*",
        kind="other",
        cause="numeric",
        said="anywhere",
    ),
    Row(
        name="numeric",
        pattern=any_of(
            r"probability tensor contains either `inf`, `nan` or element < 0",
            r"\bFloatingPointError\b",
            r"returned nan values in its \d+\w\w output",
            r"scale already at minimum",
            r"\b(?:loss|grad\w*|norm|logits|reward|advantages?)"
            r" (?:is|are|became|was|contains?|has|returned in \S+ is)(?: an?)? (?:nan"
            r"|inf(?:inite)?|non-?finite|not (?:a )?finite)\b|cannot convert float (?:NaN|infinity) to integer",
            rf"(?:found|detected|encountered|got) .{{0,40}}{_NUMBERLESS}"
            rf"|{_NUMBERLESS} .{{0,30}}(?:detected|found|encountered)",
            rf"{_NUMBERLESS} (?:loss|gradient|grad|norm|value)|satisfy the constraint .{{0,200}}but found invalid values",
            r"for gradients from `parameters` is non-finite|cannot be converted to type .{1,60} without overflow",
            r"linalg\.\w+: .{0,120}(?:failed to converge|ill-conditioned)",
        ),
        kind="other",
        cause="numeric",
    ),
    Row(
        # Files, processes and threads are counted, and a job may have so many.
        name="limits",
        pattern=any_of(
            r"Too many open files|received \d+ items of ancdata|\(os error 24\)",
            r"can't start new thread|BlockingIOError: .{0,40}Resource temporarily unavailable|fork: retry: Resource temporarily",
            r"pthread_create failed|Thread creation failed: Resource",
        ),
        kind="other",
        cause="disk_or_permission",
    ),
    Row(
        # What Kubernetes says when it ends a pod for its files.
        name="disk_evicted",
        pattern=r"low on resource: ephemeral-storage|ephemeral local storage usage exceeds",
        kind="other",
        cause="disk_or_permission",
        said="anywhere",
        sure=True,
    ),
    Row(
        name="disk",
        pattern=any_of(
            r"No space left on device|Read-only file system|Permission denied|Disk quota exceeded|Stale (?:NFS )?file handle",
            r"\bFileExistsError\b"
            r"|\b(?:NotADirectory|IsADirectory|Permission)Error\b",
            r"inline_container\.cc:\d+\] \. unexpected pos|PytorchStreamWriter failed|file write failed",
            r"Input/output error|Remote I/O error|Transport endpoint is not connected|No locks available|Text file busy",
            r"File name too long|File too large|not enough (?:free )?(?:disk )?space|\bOutOfDiskError\b|Local disk is full",
            r"database or disk is full|unable to open database file|attempt to write a readonly database|database is locked",
            r"\(os error (?:5|13|18|28|30|116|122)\)"
            r"|\bkind: (?:StorageFull|PermissionDenied|ReadOnlyFilesystem|QuotaExceeded)",
        ),
        kind="other",
        cause="disk_or_permission",
    ),
    Row(
        # Processes of one job that look for each other, and one of them is not there.
        name="rendezvous_unanswered",
        pattern=r"client socket has (?:failed to connect|timed out)|The client socket has"
        r"|failed to connect to any network address|\bRendezvous\w*Error\b|\bTCPStore\b",
        places=r"torch/distributed/(?:elastic/rendezvous/|rendezvous\.py|distributed_c10d\.py)",
        innermost=8,
        kind="other",
        cause="hang_or_nccl",
    ),
    Row(
        # Nobody answers at an address: not the same as one who is there and waits.
        name="unreachable",
        pattern=any_of(
            r"client socket has (?:failed to connect|timed out)|The client socket has|failed to connect to any network address",
            r"Could not (?:connect to|find any running) (?:the |a )?(?:existing |running )?(?:Ray|GCS)|Failed to connect to GCS"
            r"|Ray Client .{0,40}(?:not|un)(?:able|reachable)|ray client connection timeout|Failed to get cluster ID from GCS",
            r"Unable to connect to GCS|No Ray (?:cluster|runtime) (?:is )?(?:running|found)",
        ),
        kind="other",
        cause="network",
    ),
    Row(
        name="rendezvous",
        pattern=any_of(
            r"EADDRINUSE|address already in use|another process is utilizing it|port \d+ is (?:already|not available)",
            r"Timed out after \d+ seconds waiting for clients|\bRendezvous\w*Error\b",
            r"The server socket has failed|current node timed out during startup|Gloo connectFullMesh failed",
            r"no socket interface found|Unable to find (?:address for|interface)",
            r"\bDistNetworkError\b|\bDistStoreError\b",
        ),
        kind="other",
        cause="hang_or_nccl",
    ),
    Row(
        name="network",
        pattern=any_of(
            r"couldn't connect to|Max retries exceeded|LocalEntryNotFoundError|OfflineModeIsEnabled|CacheNotFound",
            r"Request error for \d+ times|check the API server",
            r"Temporary failure in name resolution|outgoing traffic has been disabled|Name or service not known"
            r"|No address associated",
            r"(?:requests|httpx|httpx2|httpcore|aiohttp|urllib3|urllib|openai|anthropic|botocore|grpc)(?:\.\w+)*\.\w*"
            r"(?:Error|Timeout|Exception|Disconnected)\b",
            r"\bHfHubHTTPError\b|\b(?:Gated|Disabled)RepoError\b|\b(?:Repository|Revision|RemoteEntry|Entry)NotFoundError\b",
            r"Couldn't reach .{1,200} on the Hub|\b[45]\d\d (?:Client|Server) Error\b"
            r"|Consistency check failed: file should be",
            r"wandb\.(?:errors\.)?(?:\w+\.)?(?:CommError|UsageError|AuthenticationError)|api_key not configured"
            r"|No API key configured",
            r"\bgaierror\b|offline mode is enabled|\bcheck your (?:internet|network) connection",
            r"(?:access|log ?in) .{0,30}gated repo|repo .{0,60}is gated|Access to model .{1,120} is restricted"
            r"|\bLocalTokenNotFoundError\b",
            r"CERTIFICATE_VERIFY_FAILED|\bSSLError\b|\bProxyError\b|\bRemoteDisconnected\b|\bIncompleteRead\b"
            r"|\bConnectTimeout\b",
            r"\b(?:APIConnection|APITimeout|RateLimit|ServerDisconnected|ClientConnector)Error\b|Too Many Requests",
            r"server .{0,60}can't be reached|waiting for (?:the )?(?:\w+ )?server\b"
            r"|server at \S+ .{0,30}(?:not|un)reachable|\bImagePullBackOff\b|\bErrImagePull\b",
            r"\bConnection(?:Refused)?Error: |Network is unreachable|StatusCode\.UNAVAILABLE",
        ),
        kind="other",
        cause="network",
    ),
    Row(
        name="version",
        pattern=any_of(
            r"\bModuleNotFoundError\b|\bImportError\b|PackageNotFoundError|No package metadata was found|\bVersionConflict\b",
            r"undefined symbol|cannot open shared object file|version `?GLIBC\w*_[\d.]+'? not found|CXXABI_[\d.]+"
            r"|Could not load library lib\S+|Unable to load any of \{?lib",
            r"\blib[\w-]+\.so[\d.]* (?:is |was |could |can)?(?:not|n't)(?: be)? found",
            r"may indicate binary incompat|module '[\w.]+' has no attribute|'_OpNamespace' '\w+' object has no attribute"
            r"|operator torchvision::nms does not exist|was removed in the NumPy"
            r"|Descriptors cannot (?:not )?be created directly",
            r"no kernel image is available|invalid device function|device kernel image is invalid|hipErrorNoBinaryForGpu"
            r"|unsupported gpu architecture|named symbol not found|not defined for option 'gpu-name'"
            r"|invalid value for --gpu-architecture",
            r"is required for a normal functioning of this module|Torch not compiled with CUDA enabled"
            r"|Found no NVIDIA driver",
            r"No CUDA GPUs are available|driver on your system is too old|driver version is insufficient"
            r"|display driver / cuda driver"
            r"|Error 80[24]:|forward compatibility was attempted|Driver/library version mismatch"
            r"|couldn't communicate with the NVIDIA driver",
            r"\[WinError (?:126|127|193|1114)\]|DLL load failed",
            r"CUDA driver initialization failed|Failed to initialize NVML: (?:Driver|.{0,20}Not Found)",
            r"CUDA version .{0,60}(?:does not match|mismatch)|(?:cuDNN|CUDA) version incompatib"
            r"|different CUDA major versions",
            r"\bMissingCUDAException\b|\bCUDAMismatchException\b|CUDA_HOME (?:does not exist|environment variable is not set)"
            r"|CUDA Setup failed despite|Error building extension '|Ninja is required|Python\.h: No such file"
            r"|Failed to find C compiler|No working C\+\+ compiler|Cannot find a working triton",
            r"does not recognize this architecture|architectures .{0,200}not supported for now"
            r"|data did not match any variant of untagged",
            r"(?:needs?|requires?) .{1,80} to be installed|[Pp]lease (?:up|down)grade |[Pp]lease install "
            r"|(?:need to|must) install ",
            r"(?:is|are|was) not (?:installed|available)\b.{0,80}install|\bpip3? install\b|n't have \w+ built in",
            r"(?:not|n't) (?:been )?(?:compiled|buil[dt]) with|built without|\bneed a GPU\b",
            # A number with a point: without one it is a setting's, as is a bare equals sign.
            r"requires? [\w.-]+ ?(?:version v?\d|(?:[<>]=?|[=~]=) ?v?(?!0\.0\b)\d+\.\d)|incompatible version"
            r"|version of .{1,60} (?:is|that is) not (?:compatible|supported)",
            r"cannot find any torch accelerator|no (?:\w+ or \w+ )*(?:XPU |CUDA )?GPUs? found|found no CUDA devices",
            r"\bnot installed\b|need to have .{1,80} installed|[Ee]nsure that .{1,120} (?:is|are) installed"
            r"|was not found but is required",
            r"\bupgrade (?:to|torch|transformers|peft|trl|vllm|accelerate|datasets|deepspeed|your)\b"
            r"|requires? `[\w.-]+ ?[<>=~]=? ?v?\d",
            r"\bversion mismatch\b|version you have installed|requires the latest version"
            r"|`?rope_scaling`? must be a dictionary with",
            r"\bPTXASError\b|\bRuntimeEnvSetupError\b"
            r"|Command '\[?'[^']*\b(?:gcc|g\+\+|cc|c\+\+|clang|nvcc|hipcc|ninja|cmake|ptxas|pip3?)'",
            r"\bCUDA binary not found"
            r"|'NoneType' object has no attribute 'c(?:de)?(?:quantize|gemm|adam|lion|igemm|get_|set_)\w*'",
            r"Failed to infer device type|Using .{1,60} requires .{1,60}: `?pip install|is a required dependency",
            r"Weights only load failed|Failed to import [\w.]+ because of the following error|Could not import module '",
        ),
        kind="other",
        cause="version",
    ),
    Row(
        # What shells and containers say of a program or a driver that is not there.
        name="command_missing",
        pattern=r"^\S*python[\d.]*: No module named \S+"
        r"|\b[\w./-]+: (?:line \d+: )?[\w./-]+: command not found|/usr/bin/env: .{1,80}: No such file or directory"
        r"|could not select device driver|nvidia-container-cli: .{1,80}error",
        kind="other",
        cause="version",
        said="anywhere",
    ),
    Row(
        name="data_without_prompts",
        pattern=r"\AKeyError: 'prompt'",
        places=r"\A",
        innermost=1,
        kind="other",
        cause="data",
    ),
    Row(
        name="data",
        pattern=any_of(
            r"DatasetGenerationError|Couldn't find any data file|doesn't contain any data files"
            r"|Couldn't find a dataset script",
            r"Column .{1,60} not in the dataset|\bDatasetNotFoundError\b|\bDataFilesNotFoundError\b|\bEmptyDatasetError\b",
            r"\bArrow(?:Invalid|TypeError|KeyError|NotImplementedError|CapacityError)\b|\bCastError\b|\bParserError\b"
            r"|\bEmptyDataError\b",
            r"\bUnicode(?:Decode|Encode)Error\b|\bBadZipFile\b|\bBadGzipFile\b|\bzlib\.error\b",
            r"jinja2\.exceptions\.\w+|index out of range in self|Unable to find '|Unknown split|num_samples=0",
            r"\bSafetensorError\b|PytorchStreamReader failed|\bUnpicklingError\b|Cannot find valid samples",
            r"stack expects each tensor to be equal size"
            r"|Unable to create tensor, you should probably|TextEncodeInput must be|TextInputSequence must be",
            r"Can't instantiate a processor, a tokenizer|\bNonMatching(?:Splits|Checksum)\w*Error\b"
            r"|\bUnexpectedSplitsError\b",
            r"is not a valid JSON file|\bEOFError: Ran out of input|piece id is out of range|\bTarget -?\d+ is out of bounds",
            r"batch received was empty|No datasets were loaded|Unexpected (?:input )?keys? in (?:the )?(?:batch|examples?)",
        ),
        kind="other",
        cause="data",
    ),
)

_BROKEN = (
    # What the driver writes into the kernel's log.
    Row(
        name="xid",
        pattern=r"\bNVRM: Xid\b|GPU has fallen off the bus|\bGPU is lost\b",
        kind="other",
        cause="cuda_fault",
        said="anywhere",
    ),
    Row(
        # bitsandbytes and ROCm print it and exit, without an exception.
        name="cuda_fault_printed",
        pattern=r"\bError (?!out of memory|no kernel image|named symbol).{3,80} at line \d+ in file \S+\.(?:cuh?|cpp|c|hip)\b"
        r"|Memory access fault by GPU node",
        kind="other",
        cause="cuda_fault",
        said="anywhere",
        sure=True,
    ),
    Row(
        name="cuda_fault",
        pattern=any_of(
            r"illegal memory access|device-side assert|unspecified launch failure|uncorrectable ECC|misaligned address",
            r"(?:CUDA|HIP) error(?: \(.{1,200}?\))?: (?!out of memory)",
            r"CUDA(?: driver| runtime)? error: (?!out of memory)|CUDA failure \d+",
            r"CUBLAS_STATUS_(?!ALLOC_FAILED)\w+|\bCUDNN_STATUS_\w+|\bCUSOLVER_STATUS_\w+|\bHIPBLAS_STATUS_\w+",
            r"Triton Error \[\w+\]: (?!out of memory)|an illegal instruction was encountered|hardware stack error",
            r"cuBLAS API failed with status",
            r"HSA_STATUS_ERROR_\w+|\bAI ?Core (?:Error|exception)|NVML: Unknown Error",
        ),
        kind="other",
        cause="cuda_fault",
        said="as an error",
    ),
)

# What the others say when one is gone: last of all words, so that the root is found before them.
_ECHOES = (
    Row(
        name="peer_gone",
        pattern=r"Connection closed by peer|Connection reset by peer|Broken pipe|Socket Timeout|Connection refused"
        r"|remote process exited or there was a network error|pair closure"
        r"|Observed flight recorder dump signal from another rank|Received a dump signal",
        kind="other",
        cause="hang_or_nccl",
        secondary=True,
        said="as an error",
    ),
    Row(
        name="collective_timeout",
        pattern=r"Watchdog caught collective operation timeout(?:.{0,200}?Timeout\(ms\)=(?P<milliseconds>\d+))?"
        r"|Timed out waiting (?P<milliseconds2>\d+)ms for (?:send|recv) operation|NCCL error|wait timeout after \d+ms"
        r"|failed to pass monitoredBarrier|received errors while waiting for send/recv from rank"
        r"|\bDistBackendError\b|watchdog got stuck|Heartbeat monitor timed out"
        r"|NCCL operations have failed or timed out|mismatch between collectives on ranks"
        r"|\bnccl(?:Internal|System|Remote)Error\b"
        r"|\bGetTimeoutError\b|RPC call to \w+ timed out|\bHCCL .{0,60}tim(?:e|ed) ?out",
        kind="other",
        cause="hang_or_nccl",
        secondary=True,
        said="as an error",
    ),
    Row(
        name="engine_wrapper",
        pattern=r"Engine core initialization failed|EngineCore failed to start|EngineCore encountered an issue"
        r"|Engine(?:Dead|Gen\w+)Error"
        r"|WorkerProc (?:initialization failed|hit an exception)|Engine process failed to start"
        r"|Engine loop (?:has died|is not running)"
        r"|Background loop (?:has errored|is not running|did not)|died unexpectedly, shutting down|Failed core proc"
        r"|Worker failed with error"
        # Ray and datasets count up why a process may have ended: they do not know either.
        r"|Worker unexpectedly exits with a connection error code 2|subprocesses has abruptly died"
        r"|Task finished unexpectedly|child did not signal ready|child exited during init",
        kind="other",
        secondary=True,
        said="as an error",
    ),
)

ROWS_OF_OTHERS: tuple[Row, ...] = (*_MISSING, *_BROKEN, *_ECHOES)
