"""One file per op: contract, problem, oracle, torch boundary, flop and byte counts."""
