"""What is asked and what is claimed: targets, problems, claims, variants."""
