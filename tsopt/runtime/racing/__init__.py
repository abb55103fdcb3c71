"""Candidates in processes of their own, timed side by side; what earlier races found."""
