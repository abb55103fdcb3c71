"""A gate for continuous integration: is an optimized model still as fast and as accurate as it was?"""
