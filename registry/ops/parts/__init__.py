"""What the ops' folders share: checks of arguments, rules for claims, cases, workloads, conformance kits, judging."""
