"""Shipped dispatch tables: data only. Read them through registry.tables."""
