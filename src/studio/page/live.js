"use strict";

// The live page. Once a second, the page asks for newer data. All data is shown as text, never as HTML.
(() => {
  const LOOKS = 300, ANNOUNCE_MS = 10_000, LINE = 15, SPARK = 16, EACH = 5;
  const at = (id) => document.getElementById(id);
  const state = {
    newest: 0, processes: new Map(), process: null, graph: null, scope: "", step: null, found: "", goes: false,
    picture: null, wanted: "", said: "", saidAt: -Infinity,
  };

  // The token stands behind the # of the address, which no server sees; the address forgets it at once.
  if (location.hash.length > 1) {
    sessionStorage.setItem("penstock-token", location.hash.slice(1));
    history.replaceState(null, "", location.pathname);
  }
  const ask = async (path, options = {}) => {
    const headers = { Authorization: `Bearer ${sessionStorage.getItem("penstock-token") || ""}` };
    const answer = await fetch(path, { cache: "no-store", ...options, headers });
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error);
    return found;
  };
  const tell = (problem) => {
    write(at("problem"), problem);
    at("problem").hidden = !problem;
  };

  // --- Elements ---

  const write = (element, text) => {
    if (element.textContent !== text) element.textContent = text;
  };
  const make = (tag, attributes = {}, text = "") => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = text;
    return element;
  };
  const draw = (tag, attributes = {}, text = "") => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = text;
    return element;
  };
  const set = (element, name, value) => {
    if (element.getAttribute(name) !== value) element.setAttribute(name, value);
  };
  const isLink = (address) => {
    try {
      return ["http:", "https:"].includes(new URL(address).protocol);
    } catch {
      return false;
    }
  };

  // Keep the elements of `items`, by their keys, as the children of a parent. Elements that exist are used again, so
  // that the keyboard's focus and a selection stay.
  const keep = (parent, items, key, build, update) => {
    const existing = new Map([...parent.children].map((child) => [child.dataset.key, child]));
    let before = parent.firstElementChild;
    for (const item of items) {
      const name = key(item);
      let child = existing.get(name);
      existing.delete(name);
      if (!child) {
        child = build(item);
        child.dataset.key = name;
      }
      if (child === before) before = before.nextElementSibling;
      else parent.insertBefore(child, before);
      update(child, item);
    }
    for (const child of existing.values()) child.remove();
  };

  // A table: `columns` are pairs of a title and whether it is a number; a row has cells, and may have a link.
  const fill = (table, caption, columns, rows, empty) => {
    if (!table.caption) {
      table.createCaption().className = "unseen";
      table.createTHead().insertRow();
      table.append(make("tbody"));
    }
    write(table.caption, caption);
    const side = (number) => (columns[number] && columns[number][1] ? "number" : "");
    const heads = columns.map(([title], number) => ({ title, number }));
    keep(table.tHead.rows[0], heads, (head) => `${head.number} ${head.title}`,
      (head) => make("th", { scope: "col", class: side(head.number) }, head.title), () => {});
    const shown = rows.length ? rows : [{ id: "", cells: [empty], span: columns.length }];
    keep(table.tBodies[0], shown, (row) => `${row.id} ${row.cells.length} ${Boolean(row.link)}`,
      (row) => {
        const made = make("tr");
        row.cells.forEach((_, number) => {
          const cell = made.appendChild(number || row.span ? make("td", { class: side(number) }) : make("th", { scope: "row" }));
          if (row.span) cell.colSpan = row.span;
          if (row.choose && !number) cell.append(make("button", { type: "button", class: "plain" }));
          if (row.link && isLink(row.link) && number === row.cells.length - 1) {
            cell.append(make("a", { href: row.link, target: "_blank", rel: "noopener noreferrer" }));
          }
        });
        return made;
      },
      (made, row) => {
        set(made, "class", row.mark || "");
        made.hidden = Boolean(row.hidden);
        row.cells.forEach((text, number) => write(made.cells[number].firstElementChild || made.cells[number], text));
        const button = made.querySelector("button");
        if (button) button.onclick = row.choose;
      });
  };

  // --- New data ---

  const take = (found) => {
    state.newest = found.number;
    askIn = 1000 * found.ask_in_seconds;
    for (const told of found.processes) {
      const process = state.processes.get(told.id) || { look: null, times: [], rates: new Map() };
      state.processes.set(told.id, process);
      Object.assign(process, { id: told.id, name: told.name, alive: told.alive, says: told.says });
      if (told.look) process.look = told.look;
      const before = process.times.length, { times, rates } = told.series;
      process.times = [...process.times, ...times].slice(-LOOKS);
      for (const key of new Set([...process.rates.keys(), ...Object.keys(rates)])) {
        const old = process.rates.get(key) || Array(before).fill(null);
        const line = [...old, ...(rates[key] || Array(times.length).fill(null))].slice(-LOOKS);
        if (line.some((rate) => rate !== null)) process.rates.set(key, line);
        else process.rates.delete(key);
      }
    }
    show();
  };
  let asking = false, askIn = 1000, next = 0;
  const tick = async () => {
    if (document.hidden || asking) return;
    asking = true;
    try {
      take(await ask(`/looks?newer=${state.newest}&scope=${encodeURIComponent(state.scope)}`));
      tell("");
    } catch (error) {
      tell(error instanceof TypeError ? "penstock studio does not answer: it has ended, or the connection is cut." : error.message);
    } finally {
      asking = false;
      clearTimeout(next);
      next = setTimeout(tick, askIn);
    }
  };

  // --- The shown data ---

  const present = () => state.processes.get(state.process);
  const graphOf = (process) => process && process.look && process.look.graphs.find((graph) => graph.id === state.graph);

  const show = () => {
    const began = performance.now();
    const all = [...state.processes.values()];
    if (!graphOf(present())) {
      // Until a person chooses, the graph that limits is shown, or the first.
      const process = all.find((one) => one.look && one.look.graphs.length) || all[0];
      const graphs = process && process.look ? process.look.graphs : [];
      const limits = process && process.look && process.look.verdict && process.look.verdict.graph;
      if (process && (!present() || graphs.length)) {
        const own = present() && present().look && present().look.graphs.length ? present() : process;
        state.process = own.id;
        const first = own === process && graphs.find((graph) => graph.id === limits);
        state.graph = (first || (own.look && own.look.graphs[0]) || { id: null }).id;
      }
    }
    showProcesses(all);
    const process = present();
    if (!process) return;
    document.body.classList.toggle("gone", !process.alive);
    at("record").disabled = !process.alive;
    showVerdict(process);
    const graph = graphOf(process);
    showScopes(graph);
    const steps = graph ? process.look.steps[graph.id] || [] : [];
    showTables(process, graph, steps);
    showPicture(process, graph, steps);
    document.body.dataset.updateMs = (performance.now() - began).toFixed(1);
  };

  const choose = (process, graph) => {
    Object.assign(state, { process, graph, scope: "", step: null, wanted: "", picture: null });
    at("picture").replaceChildren();
    show();
    tick();
  };

  const showProcesses = (all) => {
    keep(at("processes"), all, (process) => String(process.id), () => {
      const made = make("div", { class: "process", role: "group" });
      made.append(make("span", { class: "who" }), make("span", { class: "graphs" }));
      return made;
    }, (made, process) => {
      const [who, graphs] = made.children;
      const number = process.look ? `, process ${process.look.process}` : "";
      write(who, `${process.name}${process.alive ? number : ": no process"}`);
      set(made, "aria-label", who.textContent);
      made.classList.toggle("dead", !process.alive);
      keep(graphs, process.look ? process.look.graphs : [], (graph) => graph.id, () => make("button", { type: "button" }),
        (button, graph) => {
          write(button, graph.rate ? `${graph.name}, ${graph.rate}` : graph.name);
          set(button, "aria-pressed", String(process.id === state.process && graph.id === state.graph));
          button.onclick = () => choose(process.id, graph.id);
        });
    });
  };

  const showVerdict = (process) => {
    const verdict = process.look && process.look.verdict;
    const section = at("verdict");
    section.classList.toggle("limits", Boolean(process.alive && verdict && verdict.key));
    let title = verdict ? verdict.title : process.look ? "Nothing has left a step lately" : "Waiting for the first figures";
    if (!process.alive) title = "No process answers";
    write(at("verdict-title"), title);
    write(at("reason"), process.alive ? (verdict ? verdict.reason : "") : process.says);
    at("try").hidden = !(process.alive && verdict && verdict.remedy);
    at("evidence").hidden = !(process.alive && verdict && verdict.evidence);
    write(at("evidence").lastElementChild, verdict ? verdict.evidence : "");
    write(at("remedy"), verdict ? verdict.remedy : "");
    write(at("gain"), verdict ? verdict.gain : "");
    keep(at("facts"), process.look ? process.look.facts : [], ([label]) => label, ([label]) => {
      const made = make("div");
      made.append(make("dt", {}, label), make("dd"));
      return made;
    }, (made, [, text]) => write(made.lastElementChild, text));
    keep(at("stalls"), process.alive && process.look ? process.look.stalls : [], (stall) => stall.thread, () => {
      const made = make("details", { class: "problem" });
      made.append(make("summary"), make("pre"));
      return made;
    }, (made, stall) => {
      write(made.firstElementChild, stall.sentence);
      write(made.lastElementChild, stall.stack);
    });
    // Only a new verdict is announced, and at most one every ten seconds.
    const said = verdict && process.alive ? `${title} limits` : title;
    if (said !== state.said && performance.now() - state.saidAt > ANNOUNCE_MS) {
      Object.assign(state, { said, saidAt: performance.now() });
      write(at("announcer"), verdict && process.alive && verdict.key ? said : title);
    }
  };

  const showScopes = (graph) => {
    const scopes = graph && graph.scopes.length > 1 ? graph.scopes : [];
    at("choose-scope").hidden = !scopes.length;
    if (!scopes.some(([id]) => id === state.scope)) state.scope = "";
    keep(at("scope"), [["", `all ${scopes.length}`], ...scopes], ([id]) => id, ([id]) => make("option", { value: id }),
      (option, [, label]) => write(option, label));
    at("scope").value = state.scope;
    const [only] = graph && graph.scopes.length === 1 ? graph.scopes : scopes.filter(([id]) => id === state.scope);
    write(at("about"), only ? only[1] : "");
    at("progress").hidden = !only || only[2] === null;
    at("progress").value = (only && only[2]) || 0;
  };

  const showTables = (process, graph, steps) => {
    const { look } = process;
    const name = graph ? graph.name : "";
    write(at("graph-title"), name || "Graph");
    const matches = (step) => !state.found || step.name.toLowerCase().includes(state.found);
    // A box with other steps inside stands for these steps.
    const box = state.picture && state.picture.boxes.get(state.step), keys = new Set([state.step, ...(box ? box.inside : [])]);
    const chosen = steps.find((step) => step.key === state.step) || (box && { name: box.box.querySelector("text").textContent });
    fill(at("steps"), `The steps of ${name}`, look ? look.columns : [], steps.map((step) => ({
      id: step.key, cells: [step.name, ...step.cells], hidden: !matches(step),
      mark: `${step.limits ? "limits" : ""}${keys.has(step.key) ? " chosen" : ""}`,
      choose: () => filter(step.key),
    })), "No step has begun yet.");
    const mine = (row) => row.graph === state.graph && (!chosen || keys.has(row.key));
    for (const button of document.querySelectorAll(".filter")) {
      button.hidden = !chosen;
      write(button, chosen ? `only ${chosen.name} ✕` : "");
    }
    const rows = (found) => found.filter(mine).map((row, number) => ({ id: row.id || String(number), ...row }));
    const none = chosen ? ` in ${chosen.name}` : "";
    fill(at("items"), "The oldest items in flight", look ? look.item_columns : [], rows(look ? look.items : []), `No item is in flight${none}.`);
    fill(at("failures"), "The newest failures", look ? look.failure_columns : [], rows(look ? look.failures : []), `Nothing has failed${none}.`);
  };
  // Show the box of a step that was searched for; boxes that have such a step inside are opened first.
  const go = () => {
    const { boxes, closed } = state.picture;
    const found = [...boxes.values()].filter(({ box }) => !box.classList.contains("dim"));
    const opened = found.filter(({ isClosed }) => isClosed).map(({ anchor }) => anchor);
    state.goes = found.length ? opened.length > 0 : closed.length > 0;
    if (state.goes) {
      Object.assign(state, { closed: found.length ? closed.filter((one) => !opened.includes(one)) : [], closedOf: state.graph });
      show();
    } else if (found.length) found[0].box.scrollIntoView({ block: "center", inline: "center" });
  };
  const filter = (key) => {
    state.step = state.step === key ? null : key;
    show();
  };

  // --- The drawing ---

  const showPicture = (process, graph, steps) => {
    const closed = state.closed === undefined || state.closedOf !== state.graph ? "" : `&closed=${state.closed.join(",")}`;
    const wanted = graph && graph.drawing ? `/drawing?process=${process.id}&graph=${encodeURIComponent(graph.id)}${closed}` : "";
    if (wanted !== state.wanted) {
      state.wanted = wanted;
      state.picture = null;
      if (!wanted) at("picture").replaceChildren();
      else ask(wanted).then((found) => wanted === state.wanted && place(found)).catch((error) => tell(error.message));
    } else if (state.picture) {
      paint(process, steps);
    }
  };

  // The picture has no data but names, which its maker has escaped; it is read as a document of its own, where no script
  // runs, before it is shown.
  const place = (found) => {
    const svg = new DOMParser().parseFromString(found.svg, "text/html").querySelector("svg");
    at("picture").replaceChildren(svg);
    const boxes = new Map();
    for (const [anchor, key] of Object.entries(found.boxes)) {
      const box = svg.querySelector(`a[href="#${anchor}"]`);
      const card = box.querySelector("rect");
      const width = Number(card.getAttribute("width"));
      const top = 40 + LINE * (box.querySelector(":scope > text.detail") ? 1 : 0), floor = top + LINE * 3 + 8 + SPARK;
      const isRoomy = found.roomy.includes(anchor);
      const lines = (isRoomy ? [0, 1, 2, 3] : []).map((nth) =>
        draw("text", { class: nth === 3 ? "detail bad" : "detail", x: width / 2, y: top + LINE * nth, "text-anchor": "middle" }));
      const spark = draw("polyline", { class: "spark" });
      if (isRoomy) card.after(draw("path", { class: "axis", d: `M12 ${floor}H${width - 12}` }));
      const badge = draw("g", { class: "badge" });
      badge.append(draw("rect", { class: "badge", x: width - 58, y: -9, width: 50, height: 18, rx: 9 }),
        draw("text", { class: "badge", x: width - 33, y: 4 }, "limits"));
      card.after(spark);
      box.append(...lines, badge);
      box.addEventListener("click", (event) => {
        event.preventDefault();
        filter(key);
      });
      const inside = found.owners[anchor] || [], isClosed = found.closed.includes(anchor);
      boxes.set(key, { anchor, box, lines, spark, width, floor, inside, isClosed, title: box.querySelector("title") });
    }
    for (const owner of Object.keys(found.owners)) {
      const box = svg.querySelector(`a[href="#${owner}"]`);
      const isClosed = found.closed.includes(owner);
      const toggle = draw("a", { class: "fold", href: "#", role: "button", "aria-expanded": String(!isClosed), tabindex: 0 });
      toggle.append(draw("rect", { x: 4, y: 6, width: 22, height: 22, rx: 5 }), draw("text", { x: 15, y: 21, "text-anchor": "middle" }, isClosed ? "+" : "−"));
      toggle.prepend(draw("title", {}, isClosed ? "Show what is inside" : "Hide what is inside"));
      toggle.addEventListener("click", (event) => {
        event.preventDefault();
        event.stopPropagation();
        state.closed = isClosed ? found.closed.filter((one) => one !== owner) : [...found.closed, owner];
        state.closedOf = state.graph;
        show();
      });
      const around = draw("g", { transform: box.getAttribute("transform") });
      around.append(toggle);
      box.after(around); // beside the box, since a link must not contain a link
    }
    const edges = found.edges.map(([from, to], number) => ({ from, to, parts: svg.querySelectorAll(`.edge-${number}`) }));
    state.picture = { boxes, edges, closed: found.closed };
    show();
    if (state.goes) go();
  };

  // A box with other steps inside shows their sums, and the step that is nearest to a limit.
  const sum = (steps) => {
    const worst = steps.reduce((one, other) => (other.limits - one.limits || other.share - one.share || other.sums[0] - one.sums[0]) > 0 ? other : one);
    const [flight, waiting, failed] = [0, 1, 2].map((nth) => steps.reduce((total, step) => total + step.sums[nth], 0).toLocaleString("en"));
    const name = worst.name.length > 18 ? `${worst.name.slice(0, 17)}…` : worst.name;
    return {
      isSum: true, name: steps.map((step) => step.name).join(" "), full: steps.some((step) => step.full), limits: worst.limits, spark: worst.key,
      rate: Math.max(...steps.map((step) => step.rate)), about: `${steps.length} steps with figures, the busiest: ${worst.about}`,
      lines: [`${flight} in flight, ${waiting} waiting`, `busiest: ${name}`, worst.lines[1], failed === "0" ? "" : `${failed} failed`],
    };
  };

  const paint = (process, steps) => {
    const { boxes, edges } = state.picture;
    const known = new Map(steps.map((step) => [step.key, step]));
    for (const [key, { inside }] of boxes) {
      const members = inside.map((one) => known.get(one)).filter(Boolean);
      if (members.length && !known.has(key)) known.set(key, sum(members));
    }
    let number = 0;
    for (const [key, { box, lines, spark, width, floor, title, isClosed }] of boxes) {
      const told = known.get(key), step = told && told.isSum && !isClosed ? null : told;
      const dim = state.found && !(step && step.name.toLowerCase().includes(state.found));
      const marks = [step && step.limits && "limits", key === state.step && "chosen", dim && "dim"];
      set(box, "class", ["box", ...marks].filter(Boolean).join(" "));
      lines.forEach((line, number) => write(line, (step && step.lines[number]) || ""));
      if (step) write(title, step.about);
      const isDue = boxes.size < 60 || !spark.hasAttribute("points") || (number + state.newest) % EACH === 0;
      number += 1;
      if (lines.length && isDue) set(spark, "points", line(process.rates.get((step && step.spark) || key) || [], width, floor));
    }
    const flow = ({ from, to }) => {
      const step = known.get(to) || known.get(from);
      return step ? step.rate : 0;
    };
    const most = Math.max(...edges.map(flow), 1e-9);
    for (const edge of edges) {
      const reader = known.get(edge.to);
      const across = (1.2 + 7 * Math.sqrt(flow(edge) / most)).toFixed(1);
      for (const part of edge.parts) {
        part.classList.toggle("held", Boolean(reader && reader.full));
        if (part.matches(".edge:not(.order)")) set(part, "stroke-width", across);
      }
    }
  };

  // Five minutes end at the right side; the highest value is at the top. A point stands for five looks, and of many
  // boxes only a fifth gets a new line at each look.
  const line = (rates, width, floor) => {
    const most = Math.max(...rates.map((rate) => rate || 0), 1e-9), step = (width - 24) / (LOOKS - 1);
    const points = [];
    for (let nth = rates.length - 1; nth >= 0; nth -= EACH) {
      const x = 12 + (LOOKS - rates.length + nth) * step, y = floor - (SPARK * (rates[nth] || 0)) / most;
      points.push(`${Math.round(x)},${Math.round(y * 10) / 10}`);
    }
    return points.join(" ");
  };

  // --- Input of a person ---

  at("scope").addEventListener("change", () => {
    state.scope = at("scope").value;
    tick();
  });
  at("search").addEventListener("input", () => {
    state.found = at("search").value.trim().toLowerCase();
    show();
  });
  at("search").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && state.found && state.picture) go();
  });
  for (const button of document.querySelectorAll(".filter")) button.addEventListener("click", () => filter(state.step));
  at("record").addEventListener("click", async () => {
    const process = present();
    try {
      const { path, seconds } = await ask(`/record?process=${process.id}`, { method: "POST" });
      const note = at("recording");
      note.hidden = false;
      note.replaceChildren(`${process.name} is recorded for ${seconds} seconds; the profile opens in `,
        make("a", { href: path, target: "_blank", rel: "noopener" }, "another tab"), ".");
      window.open(path, "_blank", "noopener");
    } catch (error) {
      tell(error.message);
    }
  });
  document.addEventListener("visibilitychange", tick);
  tick();
})();
