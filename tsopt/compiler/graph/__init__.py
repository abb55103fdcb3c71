"""The Program: a graph, its text, its files, and facts about its ops."""
