"""What privacy costs in recall, on real images, with every choice fixed in code: `make study`.

grid.py     who is public, trains, chooses recipes and is tested; contests and final rows
run.py      one row by `fedemb.Simulation`; contests, then what they chose, within a budget
report.py   tables with paired intervals, and the figure
results/    what the last study found
"""
