// Search runs in a web worker, which browsers refuse to pages that are opened from files. There an iframe takes its
// place: it loads the worker's script and passes messages on. On a server nothing changes.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const inside = frame.contentWindow;
      const load = script =>
        new Promise((resolve, reject) => {
          const element = inside.document.createElement("script");
          element.src = new URL(script, document.baseURI).href;
          element.onload = resolve;
          element.onerror = reject;
          inside.document.body.appendChild(element);
        });
      // One script after the other, as a worker would load them.
      inside.importScripts = (...scripts) => scripts.reduce((before, script) => before.then(() => load(script)), Promise.resolve());
      // What the worker sends comes out here; what it is sent goes in as events, not through this.
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside = inside;
      this.ready = load(url);
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
