"""What privacy costs in recall, on real images, with every choice fixed in code: `make study`.

protocol.py   who is public, who trains, who chooses recipes, who is read once
rows.py       a row: net, method, noise, seed, recipe
grid.py       the contests, as many recipes for each; what is read when they are decided; ablations
decide.py     runs contests, then what they chose
train.py      one row: `fedemb.Simulation` on arrays
execute.py    processes, budget, cache, resuming
certify.py    what a row's noise costs at 1e5, 1e6 and 1e7 users
table.py      lines of the tables: means, intervals, paired differences
write.py      Markdown and JSON
page.py       figure and self-contained page
results/      what the last study found, as its command wrote it
"""
