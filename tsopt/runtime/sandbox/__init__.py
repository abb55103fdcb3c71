"""Candidates in processes of their own."""
