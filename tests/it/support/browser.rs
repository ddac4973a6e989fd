//! A real Chromium, driven through chromedriver. Tests use it one after another.
//!
//! The little of the WebDriver protocol that the tests need is spoken here: the crates that speak all of it turn on
//! features of what the product itself is built from, and the binary under test would no longer be the one shipped.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use reqwest::Client;
use serde_json::{Value, json};

use super::http_client;

/// A browser beside others on a busy machine takes its time.
const PATIENCE: Duration = Duration::from_secs(90);
/// Polling a page costs more than polling a server.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// No GPU, and none of the services that a browser runs for its user.
const FLAGS: [&str; 14] = [
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--window-size=1280,900",
    "--disable-gpu",
    "--disable-software-rasterizer",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--disable-features=Translate,MediaRouter,OptimizationHints",
    "--no-first-run",
    "--mute-audio",
];

/// Browsers that no test uses at the moment: starting one takes more CPU than most tests do in it.
static IDLE: Mutex<Vec<Process>> = Mutex::new(Vec::new());

pub struct Browser {
    client: Client,
    /// Where the pages are.
    url: String,
    process: Process,
}

/// A chromedriver with one Chromium.
struct Process {
    keeper: Child,
    /// Where chromedriver takes commands for its browser.
    session: String,
}

/// Ends chromedriver and its browser when stdin closes: idle browsers are in a static, which is never dropped.
const KEEPER: &str = "
    chromedriver --port=0 2>/dev/null </dev/null &
    exec >/dev/null
    cat >/dev/null
    kill -s KILL -- -$$
";

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}

/// What a page records about itself from its first line on: refusals by its content policy, and errors.
const RECORDER: &str = "
    window.recorded = [];
    document.addEventListener('securitypolicyviolation', (event) => recorded.push(`${event.violatedDirective} ${event.blockedURI}`));
    addEventListener('error', (event) => recorded.push(String(event.message)));
    addEventListener('unhandledrejection', (event) => recorded.push(String(event.reason)));
";

impl Process {
    async fn start(client: &Client) -> Self {
        let mut keeper = Command::new("sh")
            .args(["-c", KEEPER])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        let lines = BufReader::new(keeper.stdout.take().unwrap()).lines();
        let mut process = Self { keeper, session: String::new() };
        let port = lines
            .map_while(Result::ok)
            .find_map(|line| Some(line.split_once("successfully on port ")?.1.trim_end_matches('.').to_owned()))
            .expect("chromedriver is installed (scripts/test installs it) and prints its port");
        let wanted = json!({ "browserName": "chrome", "goog:chromeOptions": { "args": FLAGS } });
        let sessions = format!("http://127.0.0.1:{port}/session");
        let opened = ask(client, &sessions, &json!({ "capabilities": { "alwaysMatch": wanted } })).await.unwrap();
        process.session = format!("{sessions}/{}", opened["sessionId"].as_str().unwrap());
        process
    }
}

impl Browser {
    /// A browser for the pages of `url`, without cookies, storage, cache or history of an earlier test.
    pub async fn open(url: &str) -> Self {
        // Connections of a client belong to the runtime of one test.
        let client = http_client().build().unwrap();
        let idle = IDLE.lock().unwrap().pop();
        let process = match idle {
            Some(idle) => idle,
            None => Process::start(&client).await,
        };
        let browser = Self { client, url: url.to_owned(), process };
        browser.tell_chromium("Page.addScriptToEvaluateOnNewDocument", json!({ "source": RECORDER })).await;
        browser
    }

    /// Leaves the browser to the next test. A test that fails never gets here, and its browser ends with it.
    pub async fn close(self) {
        // Storage goes by origin, which the next server may have again; cookies are the same for every port.
        let origin = json!({ "origin": self.url, "storageTypes": "all" });
        self.tell_chromium("Storage.clearDataForOrigin", origin).await;
        self.tell_chromium("Network.clearBrowserCookies", json!({})).await;
        self.tell_chromium("Network.clearBrowserCache", json!({})).await;
        // History, session storage, emulation and scripts belong to the tab.
        let tab = self.command("window/new", json!({ "type": "tab" })).await;
        self.client.delete(format!("{}/window", self.process.session)).send().await.unwrap();
        self.command("window", json!({ "handle": tab["handle"] })).await;
        IDLE.lock().unwrap().push(self.process);
    }

    /// Loads a page and waits until it is drawn.
    pub async fn visit(&self, path: &str) {
        self.command("url", json!({ "url": format!("{}{path}", self.url) })).await;
        self.until("a heading", "return document.querySelector('main h1') !== null").await;
    }

    /// Goes to another page of the dashboard by a link, which loads no file again.
    pub async fn follow(&self, path: &str) {
        let click = format!(
            "document.querySelector('main h1').dataset.left = 'yes';
             const link = document.createElement('a');
             link.href = {};
             document.body.append(link);
             link.click();
             link.remove();",
            json!(path)
        );
        self.run(&click).await;
        self.until(path, "return document.querySelector('main h1:not([data-left])') !== null").await;
    }

    /// Loads a page that is not one of the dashboard's.
    pub async fn open_page(&self, path: &str) {
        self.command("url", json!({ "url": format!("{}{path}", self.url) })).await;
    }

    /// Runs a function body in the page; what it returns must be JSON.
    pub async fn run(&self, script: &str) -> Value {
        self.command("execute/sync", json!({ "script": script, "args": [] })).await
    }

    /// Runs a function body in the page that hands its JSON to the callback in `arguments[0]`.
    pub async fn run_async(&self, script: &str) -> Value {
        self.command("execute/async", json!({ "script": script, "args": [] })).await
    }

    /// Waits until a function body returns true in the page.
    pub async fn until(&self, what: &str, script: &str) {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        while self.run(script).await != true {
            assert!(tokio::time::Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Waits until an element is there whose text contains these words.
    pub async fn until_reads(&self, selector: &str, words: &str) {
        let script = format!(
            "return [...document.querySelectorAll({})].some((element) => element.textContent.includes({}))",
            json!(selector),
            json!(words)
        );
        self.until(&format!("{words:?} in {selector}"), &script).await;
    }

    pub async fn text(&self, selector: &str) -> String {
        let script = format!("return document.querySelector({}).textContent", json!(selector));
        self.run(&script).await.as_str().unwrap().to_owned()
    }

    /// Clicks as a user would, once it can be: where something covers the element, this fails. One that the page draws
    /// anew before the click arrives is looked for again.
    pub async fn click(&self, selector: &str) {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            self.until(selector, &format!("return document.querySelector({}) !== null", json!(selector))).await;
            let found = self.ask("element", &json!({ "using": "css selector", "value": selector })).await;
            let clicked = match found {
                Ok(element) => self.ask(&format!("element/{}/click", id_of(&element)), &json!({})).await,
                gone => gone,
            };
            match clicked {
                Ok(_) => return,
                Err(error) if error.contains("stale element") || error.contains("no such element") => {
                    assert!(tokio::time::Instant::now() < deadline, "{selector} never stays: {error}");
                }
                Err(error) => panic!("a click on {selector}: {error}"),
            }
        }
    }

    /// Types into whatever has the focus.
    pub async fn press(&self, keys: &str) {
        let focused = self.run("return document.activeElement").await;
        self.command(&format!("element/{}/value", id_of(&focused)), json!({ "text": keys })).await;
    }

    pub async fn back(&self) {
        self.command("back", json!({})).await;
    }

    /// Whether the reader has asked for less motion.
    pub async fn calm(&self, reduced: bool) {
        let value = if reduced { "reduce" } else { "no-preference" };
        let features = json!({ "features": [{ "name": "prefers-reduced-motion", "value": value }] });
        self.tell_chromium("Emulation.setEmulatedMedia", features).await;
    }

    /// The size of the window in CSS pixels, and whether the reader likes it dark.
    pub async fn look(&self, width: u32, height: u32, dark: bool) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.tell_chromium("Emulation.setDeviceMetricsOverride", size).await;
        let scheme = if dark { "dark" } else { "light" };
        let features = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.tell_chromium("Emulation.setEmulatedMedia", features).await;
    }

    pub async fn screenshot(&self) -> Vec<u8> {
        let answer: Value =
            self.client.get(format!("{}/screenshot", self.process.session)).send().await.unwrap().json().await.unwrap();
        STANDARD.decode(answer["value"].as_str().unwrap()).unwrap()
    }

    /// What the page recorded about itself: nothing, if all is well.
    pub async fn recorded(&self) -> Value {
        self.run("return window.recorded").await
    }

    async fn tell_chromium(&self, command: &str, parameters: Value) {
        self.command("goog/cdp/execute", json!({ "cmd": command, "params": parameters })).await;
    }

    async fn command(&self, command: &str, parameters: Value) -> Value {
        let answer = self.ask(command, &parameters).await;
        answer.unwrap_or_else(|error| panic!("{command} with {parameters}: {error}"))
    }

    async fn ask(&self, command: &str, parameters: &Value) -> Result<Value, String> {
        ask(&self.client, &format!("{}/{command}", self.process.session), parameters).await
    }
}

/// One command to chromedriver: what it answers, or why it could not do it.
async fn ask(client: &Client, url: &str, parameters: &Value) -> Result<Value, String> {
    let mut answer: Value = client.post(url).json(parameters).send().await.unwrap().json().await.unwrap();
    match answer["value"]["error"].is_null() {
        true => Ok(answer["value"].take()),
        false => Err(answer["value"]["message"].to_string()),
    }
}

/// Elements go over the wire as an object with one field, named by the standard.
fn id_of(element: &Value) -> &str {
    element["element-6066-11e4-a52e-4f735466cecf"].as_str().expect("an element")
}
