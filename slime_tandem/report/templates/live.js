"use strict";
(() => {
  // Parts of the page come as HTML that the server has escaped. They are merged into what is shown, so that focus, filters,
  // open details and the place on the page stay; scripts in them would not run even without the page's policy.
  const live = document.getElementById("live");
  const policy = window.trustedTypes
    ? window.trustedTypes.createPolicy("live", { createHTML: (html) => html })
    : { createHTML: (html) => html };

  const morph = (old, fresh) => {
    if (old.classList.contains("cross")) return;
    for (const { name } of [...old.attributes]) {
      if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
    }
    for (const { name, value } of fresh.attributes) {
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    merge(old, fresh);
  };
  const keyOf = (node) => (node.nodeType === Node.ELEMENT_NODE ? node.dataset.key || node.id : "");
  const merge = (old, fresh) => {
    const wanted = [...fresh.childNodes];
    wanted.forEach((node, i) => {
      const here = old.childNodes[i];
      if (!here) old.append(node);
      else if (here.nodeName !== node.nodeName || keyOf(here) !== keyOf(node)) here.replaceWith(node);
      else if (node.nodeType === Node.ELEMENT_NODE) morph(here, node);
      else if (here.data !== node.data) here.data = node.data;
    });
    while (old.childNodes.length > wanted.length) old.lastChild.remove();
  };

  let source = null;
  let since = live.dataset.since;
  let heard = Date.now();
  let age = null;
  let timer = null;
  const say = (state, text) => {
    live.dataset.state = state;
    live.querySelector(".words").textContent = text;
  };
  const words = (s) => (s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min` : `${Math.round(s / 3600)} h`);
  const tick = () => {
    if (live.dataset.state !== "on") return;
    say("on", age === null ? "live" : `live, last change ${words(age + (Date.now() - heard) / 1000)} ago`);
  };
  const open = () => {
    source = new EventSource("events?since=" + encodeURIComponent(since));
    source.addEventListener("part", (event) => {
      if (event.lastEventId) since = event.lastEventId;
      const { name, html } = JSON.parse(event.data);
      const part = document.querySelector(`[data-part="${CSS.escape(name)}"]`);
      if (!part) return location.reload(); // a page of an older server
      const template = document.createElement("template");
      template.innerHTML = policy.createHTML(html);
      merge(part, template.content);
      document.dispatchEvent(new Event("parts"));
      const title = document.querySelector("[data-title]");
      if (title) document.title = title.dataset.title;
    });
    source.addEventListener("beat", (event) => {
      heard = Date.now();
      age = JSON.parse(event.data).age;
      live.dataset.state = "on";
      tick();
    });
    source.addEventListener("error", () => {
      say("off", "the server does not answer; trying again");
      if (source.readyState !== EventSource.CLOSED || timer) return;
      timer = setTimeout(() => { timer = null; open(); }, 2000); // the browser gave up, we do not
    });
  };
  addEventListener("pagehide", () => source && source.close());
  addEventListener("pageshow", (event) => { if (event.persisted) open(); });
  setInterval(tick, 1000);
  open();
})();
