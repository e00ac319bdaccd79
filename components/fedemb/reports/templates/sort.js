for (const [i, title] of document.querySelectorAll("thead th").entries())
  title.onclick = () => {
    const body = title.closest("table").tBodies[0], up = title.dataset.up = -(title.dataset.up || -1);
    const text = row => row.cells[i].textContent, number = row => parseFloat(text(row));
    const order = (a, b) => number(a) - number(b) || text(a).localeCompare(text(b));
    body.append(...[...body.rows].sort((a, b) => up * order(a, b)));
  };
