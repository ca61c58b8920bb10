"""What an op's folder is made of: cases, workloads, conformance kits, judging."""
