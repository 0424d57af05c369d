// Search on pages that are opened from a folder, where browsers start no workers: runs a worker's script in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = `<script src="${new URL(address, location)}"></script>`
      this.script = new Promise(resolve => {
        frame.onload = () => {
          frame.contentWindow.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
          resolve(frame.contentWindow)
        }
      })
      document.body.append(frame)
    }

    postMessage(data) {
      this.script.then(script => script.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
