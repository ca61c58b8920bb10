"""What one tree does, as JSON: run by tools/replay.py and carry.py once in each of two trees, in a process of its own.

    python tools/replay_snapshot.py questions|decisions|builds|code|warm|sources|launches --folder TREE --out FILE

Only names that every version has may be used here: the public ones of `registry`, and what a Variant declares; the
questions alone are drawn from what the new tree declares. No kernel, module or table is named, so files may move and
variants may come without a change here.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import re
import subprocess
import sys
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from host_code import code_beside_declarations
from replay_problems import BUILD_TARGETS, BUILDS, TARGETS, drawn, odd_calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--share", default="0/1")
    parser.add_argument("--keys", type=Path)
    parser.add_argument("--asked", type=Path)
    parser.add_argument("--questions", type=Path)
    options = parser.parse_args()
    # The editable install would answer for any module that this tree lacks, with one of another tree.
    sys.meta_path[:] = [f for f in sys.meta_path if not str(getattr(f, "__module__", "")).startswith("__editable__")]
    found = KINDS[options.kind](options)
    assert_all_from(options.folder)
    options.out.write_text(json.dumps(found, default=str), encoding="utf-8")


def assert_all_from(folder: Path) -> None:
    """Every module of the registry, plugins included, was loaded from this tree."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "registry":
            for place in (*getattr(module, "__path__", ()), getattr(module, "__file__", None)):
                assert place is None or folder.resolve() in Path(place).resolve().parents, (name, place)


def words_text(words: dict[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in words.items())


def outcome(ask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The answer, or the error as data: a refusal is a decision, too."""
    try:
        return ask(*args, **kwargs)
    except Exception as error:
        return {"raised": type(error).__name__, "text": re.sub(r"0x[0-9a-f]+", "0x", str(error))}


def problem_of(op: Any, words: dict[str, Any], target: Any) -> Any:
    """The problem of these words; `grad_lse` is a field that `of_shape` does not take."""
    apart = {name: words[name] for name in ("grad_lse",) if name in words}
    sizes = {name: value for name, value in words.items() if name not in apart}
    return dataclasses.replace(op.problem_type.of_shape(target, **sizes), **apart)


# --- decisions ----------------------------------------------------------------------------------------------------


def questions(options: argparse.Namespace) -> dict[str, Any]:
    """What both trees are asked: problems of every op of this one."""
    from registry.ops.known import all_ops

    return {name: list(drawn(name, 12 if options.quick else 110)) for name in sorted(all_ops())}


def decisions(options: argparse.Namespace) -> dict[str, Any]:
    """`explain` of drawn problems, free and with one variant forced, and of calls with tensors that lie oddly."""
    import registry

    targets = {name: registry.Target.named(name) for name in TARGETS}
    found: dict[str, Any] = {f"variant {name}": {"op": v.op} for name, v in sorted(registry.variants().items())}
    for op_name, asked in json.loads(options.questions.read_text(encoding="utf-8")).items():
        if (op := getattr(registry, op_name, None)) is None:
            continue  # an op that is new
        names = sorted(op.variants)
        for number, words in enumerate(asked):
            forced = names[number % len(names)]
            for place, target in targets.items():
                key = f"{op_name} {words_text(words)} @ {place}"
                found[key] = outcome(explained, op, words, target)
                if number % 4 == 0:
                    found[f"{key} variant={forced}"] = outcome(explained, op, words, target, variant=forced)
    for name, (op_name, tensors, words) in odd_calls().items():
        for place, target in targets.items():
            call = outcome(getattr(registry, op_name).explain, *tensors, target=target, **words)
            found[f"{op_name} call with {name} @ {place}"] = call if isinstance(call, dict) else call.to_dict()
    return found


def explained(op: Any, words: dict[str, Any], target: Any, **how: Any) -> Any:
    return op.explain(problem_of(op, words, target), target=target, **how).to_dict()


# --- machine code -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Declared:
    """One config of one variant for one problem: all that `builds` is asked with."""

    key: str
    variant: Any
    problem: Any
    config: Any

    def each(self, describe: Callable[[Any, Any], Any]) -> list[Any]:
        """`describe` of each kernel that is declared for it."""
        return [describe(build, self.problem.target) for build in self.variant.builds(self.problem, self.config)]


def declared_builds(options: argparse.Namespace) -> Iterator[Declared]:
    """What `--asked` lists, else every variant's every legal config for the shapes in BUILDS; `--share` and `--keys`
    pick some of them."""
    share, shares = map(int, options.share.split("/"))
    wanted = set(json.loads(options.keys.read_text(encoding="utf-8"))) if options.keys else None
    number = 0
    for declared in measured_builds(options.asked) if options.asked else all_builds(options):
        if wanted is None or declared.key in wanted:
            number += 1
            if number % shares == share:
                yield declared


def measured_builds(asked: Path) -> Iterator[Declared]:
    """Those of measured rows, in the order of the file: [key, variant, case as a journal has it, config, target]."""
    import registry
    from registry.ops.parts.cases import Case

    variants, problems = registry.variants(), {}
    for key, name, case, config, target in json.loads(asked.read_text(encoding="utf-8")):
        about = f"{target} {json.dumps(case)}"
        if about not in problems:
            problems[about] = Case.from_data(case).problem(registry.Target.named(target))
        yield Declared(key, variants[name], problems[about], config)


def all_builds(options: argparse.Namespace) -> Iterator[Declared]:
    import registry

    for target in map(registry.Target.named, BUILD_TARGETS):
        for name, variant in sorted(registry.variants().items()):
            for words in BUILDS.get(variant.op, ())[: 2 if options.quick else None] if variant.builds else ():
                problem = problem_of(getattr(registry, variant.op), words, target)
                configs = [] if variant.reasons(problem) else variant.legal_configs(problem)
                for config in configs[: 1 if options.quick else None]:
                    key = f"{name} {words_text(words)} @ {target.name} {json.dumps(dict(config), sort_keys=True)}"
                    yield Declared(key, variant, problem, config)


def builds(options: argparse.Namespace) -> dict[str, Any]:
    """A digest of what the compiler would be given for each declared build."""
    return {declared.key: outcome(declared.each, input_digest) for declared in declared_builds(options)}


def code(options: argparse.Namespace) -> dict[str, Any]:
    """The compiler's input, the instructions and the launch facts of the builds that are asked for by key."""
    return {declared.key: outcome(declared.each, input_and_code) for declared in declared_builds(options)}


def input_digest(build: Any, target: Any) -> str:
    return hashlib.sha256(compiler_input(build, target).encode()).hexdigest()


def input_and_code(build: Any, target: Any) -> dict[str, str]:
    return {"input": compiler_input(build, target), "machine code": machine_code(build, target)}


LAUNCH_FACTS = (
    "num_warps",
    "num_ctas",
    "shared",
    "tmem_size",
    "cluster_dims",
    "global_scratch_size",
    "global_scratch_align",
    "profile_scratch_size",
    "launch_pdl",
    "launch_cooperative_grid",
)
"""What a launch takes from the compiler besides the code."""


class _Stop(BaseException):
    """Ends a compilation after the frontend; no Exception, so that Triton does not dress it up."""


_answered: dict[str, str] = {}


def compiler_input(build: Any, target: Any) -> str:
    """All that the passes after the first stage get: options, and the module without locations and function names.

    The first stage inlines and simplifies, so how a kernel is cut into functions does not count. Equal text is equal
    machine code. Locations only reach debug info; names only reach symbols, and they hold the module's path.
    `triton.compile` itself is run up to there, so that this asks what a launch would ask.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    gpu = GPUTarget("cuda", target.sm, 32)
    source, caught = build.source(target), []
    asked = f"{gpu} {source.hash()} {sorted(build.options.items(), key=str)}"
    if asked in _answered:  # Triton's cache may hold it by now, and would not ask its frontend
        return _answered[asked]
    real, backend = source.make_ir, make_backend(gpu)

    def make_ir(*args: Any) -> Any:
        module, stages = real(*args), {}
        (options,) = (arg for arg in args if hasattr(arg, "num_warps"))
        backend.add_stages(stages, options, source.language)
        module = next(iter(stages.values()))(module, {})
        caught.extend((str(options), without_names(module.str_nodebug())))
        raise _Stop

    source.make_ir = make_ir
    try:
        triton.compile(source, target=gpu, options=dict(build.options))
    except _Stop:
        _answered[asked] = "\n".join(caught)
        return _answered[asked]
    raise AssertionError("Triton compiled without asking its frontend: its cache should have been empty")


def without_names(text: str) -> str:
    """MLIR with its symbols numbered in order of appearance."""
    seen: dict[str, str] = {}
    return re.sub(r'@("[^"]*"|[\w$.-]+)', lambda found: seen.setdefault(found[0], f"@f{len(seen)}"), text)


def machine_code(build: Any, target: Any) -> str:
    """The instructions, and the numbers that a launch takes from the compiler."""
    import triton
    from triton.backends.compiler import GPUTarget

    made = triton.compile(build.source(target), target=GPUTarget("cuda", target.sm, 32), options=dict(build.options))
    facts = {name: str(getattr(made.metadata, name, "")) for name in LAUNCH_FACTS}
    cubin = Path(triton.knobs.cache.dir, f"replay-{hashlib.sha256(made.asm['cubin']).hexdigest()}.cubin")
    cubin.write_bytes(made.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    sass = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout
    # Instructions with their addresses, and labels of branches; headers and symbols hold names and paths.
    lines = [line.strip() for line in sass.splitlines() if re.match(r"\s*(/\*[0-9a-f]{4,}\*/|\.L_x_\d+:)", line)]
    assert lines, "nvdisasm printed no instruction"
    return "\n".join([json.dumps(facts), *lines])


# --- launches -----------------------------------------------------------------------------------------------------


def sources(options: argparse.Namespace) -> dict[str, Any]:
    """The fingerprint of each variant, which measurements carry."""
    import registry
    from registry.dispatch.fingerprint import fingerprint_of

    return {name: fingerprint_of(variant) for name, variant in sorted(registry.variants().items())}


def launches(options: argparse.Namespace) -> dict[str, Any]:
    """What is launched, Triton's own keys of the kernels, and in what each build differs from the next: said by the
    `Call`s that the builds are made from. Of a variant that builds nothing it is what it runs on the host."""
    from triton.runtime.jit import JITCallable

    from registry.toolbox.call import Call

    JITCallable.starting_line_number = property(lambda _: 0, lambda *_: None)  # in a key, for debuggers alone
    seen: list[Any] = []
    real = Call.build

    def build(call: Any, arch: Any) -> Any:
        made = real(call, arch)
        seen.append((call, made))
        return made

    def described(declared: Declared) -> Any:
        seen.clear()
        if declared.variant.builds is None:
            return {"launches": [code_beside_declarations(declared.variant)], "keys": [], "features": []}
        declared.variant.builds(declared.problem, declared.config)
        return {
            "launches": [in_words(call) for call, _ in seen],
            "keys": [made.source(declared.problem.target).hash() for _, made in seen],
            "features": sorted({one for _, made in seen for one in features(made)}),
        }

    Call.build = build  # type: ignore[method-assign]
    return {declared.key: outcome(described, declared) for declared in declared_builds(options)}


def in_words(call: Any) -> str:
    """The grid, and what the kernel is given, by the names of its parameters; constants are the compiler's."""
    given = {name: plainly(call.arguments[name]) for name in call.kernel.arg_names if name in call.arguments}
    return f"{call.grid} {given} {sorted(call.options.items())} cluster={call.cluster}"


def plainly(value: Any) -> str:
    """An argument in words; stand-ins of tensors, also those in tensor maps, by all that they say."""
    if type(value).__module__.startswith("registry.") or hasattr(value, "block_shape"):
        inside = sorted(vars(value).items())
        return f"{type(value).__name__}({', '.join(f'{name}={plainly(one)}' for name, one in inside)})"
    return re.sub(r"(<function) \S+ at 0x[0-9a-f]+|( at 0x[0-9a-f]+)", r"\1", repr(value))


def features(build: Any) -> Iterator[str]:
    """All in which one build of a kernel differs from the next; a record of constants by each of them."""
    constants: dict[str, Any] = {}
    for name, value in build.constants.items():
        fields = vars(value) if dataclasses.is_dataclass(value) and hasattr(value, "__dict__") else {"": value}
        constants |= {f"{name}.{field}": one for field, one in fields.items()}
    for of in (build.signature, constants, build.alignment, build.options):
        yield from (f"{build.name} {name}={plainly(value)}" for name, value in of.items())


# --- the warm call ------------------------------------------------------------------------------------------------


def warm(options: argparse.Namespace) -> dict[str, float]:
    """Microseconds: the decision of a call that was made before, and such calls of kernels that do nothing."""
    import torch

    import registry

    q, k, v = torch.randn(3, 2, 4, 64, 64)
    a, b = q[0, 0], k[0, 0]
    attention, matmul = registry.attention, registry.matmul
    attention(q, k, v), matmul(a, b)
    masks, epilogue = (False, None, 0.0, False, None), (None, None, None)
    found = {
        "attention decision": best_us(lambda: attention.find_plan(masks, q, k, v), options),
        "matmul decision": best_us(lambda: matmul.find_plan(epilogue, a, b), options),
    }
    claims: Any = dict(arch=("any",), dtypes=("float32",), ieee=True)
    shapes = {"attention": dict(layouts=("bhsd",), head_dim=(1, 512)), "matmul": dict(layouts=("nn",))}
    idle = {"attention": lambda q, k, v, *, scale, config: (q, None), "matmul": lambda a, b, *, config: a}
    for op, run in idle.items():
        requires = registry.Requires(**claims, **shapes[op])
        registry.register(registry.Variant(f"replay.{op}", op=op, run=run, requires=requires))
    with registry.use("replay.attention", "replay.matmul"):
        found["attention call"] = best_us(lambda: attention(q, k, v), options)
        found["matmul call"] = best_us(lambda: matmul(a, b), options)
    return found


def best_us(function: Callable[[], Any], options: argparse.Namespace) -> float:
    """The fastest of many short runs: what the code costs when nobody else has the core."""
    assert function() is not None
    return min(timeit.repeat(function, number=1000, repeat=20 if options.quick else 80)) / 1000 * 1e6


KINDS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "questions": questions,
    "decisions": decisions,
    "builds": builds,
    "code": code,
    "sources": sources,
    "launches": launches,
    "warm": warm,
}

if __name__ == "__main__":
    main()
