// Lets search work when the site is opened from disk. Browsers refuse workers for file:// pages, so
// this class runs the script of a worker in a hidden frame of the page.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = "<!doctype html><title>worker</title>"
      frame.onload = () => this.start(frame, String(url))
      document.documentElement.append(frame)
    }

    start(frame, url) {
      frame.onload = null
      const scope = frame.contentWindow
      const load = address => new Promise((resolve, reject) => {
        const script = frame.contentDocument.createElement("script")
        script.src = address
        script.onload = resolve
        script.onerror = () => reject(new Error(`cannot load ${address}`))
        frame.contentDocument.head.append(script)
      })
      scope.importScripts = (...addresses) =>
        addresses.reduce((before, address) => before.then(() => load(address)), Promise.resolve())
      scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
      load(url).then(() => {
        this.scope = scope
        this.waiting.forEach(data => this.postMessage(data))
      })
    }

    postMessage(data) {
      if (this.scope) this.scope.dispatchEvent(new this.scope.MessageEvent("message", {data}))
      else this.waiting.push(data)
    }

    terminate() {}
  }
  window.Worker = window.IFrameWorker
}
