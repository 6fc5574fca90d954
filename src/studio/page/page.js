"use strict";

// The table: a heading sorts the nodes of each graph by its column, numbers downwards first; unknown values come
// last.
(() => {
  const table = document.getElementById("nodes");
  const graphs = [...table.tBodies].map((body) => [body, [...body.rows].filter((row) => row.id)]);
  const headings = [...table.tHead.rows[0].cells];
  const compare = (left, right, isNumber) =>
    isNumber ? Number(left) - Number(right) : left.localeCompare(right, undefined, { numeric: true });
  const sort = (column) => {
    const heading = headings[column];
    const isNumber = heading.classList.contains("number");
    const order = isNumber ? ["descending", "ascending", "none"] : ["ascending", "descending", "none"];
    const next = order[(order.indexOf(heading.getAttribute("aria-sort")) + 1) % 3];
    for (const other of headings) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", next);
    const sign = next === "descending" ? -1 : 1;
    const value = (row) => row.cells[column].dataset.value;
    for (const [body, original] of graphs) {
      const rows = [...original];
      if (next !== "none") {
        rows.sort((a, b) => {
          const [left, right] = [value(a), value(b)];
          if (left === "" || right === "") return (left === "") - (right === "");
          return sign * compare(left, right, isNumber);
        });
      }
      body.append(...rows); // below the heading, which stays where it is
    }
  };
  headings.forEach((heading, column) => heading.querySelector("button").addEventListener("click", () => sort(column)));
})();
