"""Verdicts on runs that hang or diverge: pure analysis of what ranks tell of themselves."""
