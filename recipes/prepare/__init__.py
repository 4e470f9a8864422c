"""Prepare documents for training: quality rules, exact and near duplicates, contamination, a report."""
