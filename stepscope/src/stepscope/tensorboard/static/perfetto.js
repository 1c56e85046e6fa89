// Keeps Perfetto from looking beyond this server: for its makers' own pages, and for a helper of its own on port 9001.
(() => {
  "use strict";
  const here = (address) => new URL(address, location).origin === location.origin;

  const fetchAnything = window.fetch;
  window.fetch = async (request, options) => {
    if (here(request.url ?? request)) return fetchAnything(request, options);
    throw new TypeError(`not here: ${request}`);
  };

  for (const name of ["append", "appendChild"]) {
    const add = document.head[name].bind(document.head);
    document.head[name] = (element) => {
      if (element.httpEquiv) return; // a policy of its own, which allows more than the one that came with this page
      if (element.src && !here(element.src)) element.onerror();
      else add(element);
    };
  }
})();
