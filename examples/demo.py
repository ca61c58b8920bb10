"""What the registry does, in a minute, on any machine: `make demo`."""

import torch

import registry
from registry import IllegalVariant, Target


def say(title: str) -> None:
    print(f"\n=== {title} " + "=" * max(0, 74 - len(title)))


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    half = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    q = torch.randn(2, 8, 512, 64, device=device, dtype=half, requires_grad=True)
    k, v = (torch.randn(2, 2, 512, 64, device=device, dtype=half, requires_grad=True) for _ in range(2))
    a, b = torch.randn(256, 512, device=device, dtype=half), torch.randn(512, 128, device=device, dtype=half)

    say(f"attention and matmul, forward and backward, on {device}")
    with registry.record() as ran:
        out = registry.attention(q, k, v, causal=True)
        out.sum().backward()
        product = registry.matmul(a, b, activation="relu")
    exact = registry.attention.reference(q, k, v, causal=True)
    exact_product = registry.matmul.reference(a, b, activation="relu")
    print(f"attention: largest error against float64: {error_of(out, exact)}")
    print(f"matmul: largest error against float64: {error_of(product, exact_product)}")
    for op, variants in ran.counts.items():
        print(f"  {op} ran {variants}")

    say("why that one, and why not the others")
    print(registry.attention.explain(q, k, v, causal=True))

    say("what an H100 would run: no GPU is needed to ask")
    shape = {"dtype": "bfloat16", "b": 4, "hq": 32, "hkv": 8, "s": 8192, "d": 128, "causal": True}
    problem = registry.attention.problem_type.of_shape(Target.named("H100"), **shape)
    print(registry.attention.explain(problem))

    say("a variant asked for by name either runs or says why not, and what would help")
    problem = registry.attention.problem_type.of_shape(Target.named("A100"), **(shape | {"d": 76}))
    try:
        registry.attention.explain(problem, variant="torch_flash")
    except IllegalVariant as refusal:
        print(refusal)


def error_of(found: torch.Tensor, exact: torch.Tensor) -> str:
    return f"{(found - exact).abs().max().item():.1e}"


if __name__ == "__main__":
    main()
