"""How many replicas each stage should have, and why.

Pure: types, histogram, capacity, demand, solve, attribution, stabilise, decide. The operator, the simulator and
`omni replay` call the same `decide`. Scraping and writing live in scrape.py and act.py.
"""
