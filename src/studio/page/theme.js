"use strict";

// Light or dark: as the system says, until the reader chooses.
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const remembered = (value) => {
    try {
      if (value) localStorage.setItem("penstock-theme", value);
      return localStorage.getItem("penstock-theme");
    } catch {
      return value; // a file may have no storage
    }
  };
  const changed = () => document.dispatchEvent(new Event("themechange"));
  const chosen = remembered();
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;
  document.getElementById("theme").addEventListener("click", () => {
    const present = root.dataset.theme || (system.matches ? "dark" : "light");
    root.dataset.theme = present === "dark" ? "light" : "dark";
    remembered(root.dataset.theme);
    changed();
  });
  system.addEventListener("change", changed);
})();
