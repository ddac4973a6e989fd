//! A real Chromium, driven through a chromedriver of its own.
//!
//! The little of the WebDriver protocol that the tests need is spoken here: the crates that speak all of it turn on
//! features of what the product itself is built from, and the binary under test would no longer be the one shipped.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use reqwest::Client;
use serde_json::{Value, json};

/// A browser beside others on a busy machine takes its time.
const PATIENCE: Duration = Duration::from_secs(90);
/// Asking a page costs more than asking a server.
const BETWEEN_LOOKS: Duration = Duration::from_millis(50);

pub struct Browser {
    client: Client,
    /// Where chromedriver takes commands for this browser.
    session: String,
    /// Where the pages are.
    url: String,
    _process: Chromedriver,
}

/// Ends chromedriver and every browser that it started, however the test ends.
struct Chromedriver(Child);

impl Drop for Chromedriver {
    fn drop(&mut self) {
        let end = format!("kill -s KILL -- -{}", self.0.id());
        let _ = Command::new("sh").args(["-c", &end]).status();
        let _ = self.0.wait();
    }
}

/// What a page records about itself from its first line on: refusals by its content policy, and errors.
const RECORDER: &str = "
    window.recorded = [];
    document.addEventListener('securitypolicyviolation', (event) => recorded.push(`${event.violatedDirective} ${event.blockedURI}`));
    addEventListener('error', (event) => recorded.push(String(event.message)));
    addEventListener('unhandledrejection', (event) => recorded.push(String(event.reason)));
";

impl Browser {
    /// Opens a browser that will look at the pages of `url`.
    pub async fn open(url: &str) -> Self {
        let mut process = Command::new("chromedriver")
            .arg("--port=0")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .expect("chromedriver is installed; scripts/test sees to that");
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let process = Chromedriver(process);
        let port = lines
            .map_while(Result::ok)
            .find_map(|line| Some(line.split_once("successfully on port ")?.1.trim_end_matches('.').to_owned()))
            .expect("chromedriver says which port it took");
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::new();
        let flags = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900"];
        let wanted = json!({ "browserName": "chrome", "goog:chromeOptions": { "args": flags } });
        let sessions = format!("http://127.0.0.1:{port}/session");
        let opened = ask(&client, &sessions, &json!({ "capabilities": { "alwaysMatch": wanted } })).await.unwrap();
        let session = format!("{sessions}/{}", opened["sessionId"].as_str().unwrap());
        let browser = Self { client, session, url: url.to_owned(), _process: process };
        browser.tell_chromium("Page.addScriptToEvaluateOnNewDocument", json!({ "source": RECORDER })).await;
        browser
    }

    /// Loads a page and waits until it is drawn.
    pub async fn visit(&self, path: &str) {
        self.command("url", json!({ "url": format!("{}{path}", self.url) })).await;
        self.until("a heading", "return document.querySelector('main h1') !== null").await;
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
            tokio::time::sleep(BETWEEN_LOOKS).await;
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
            self.client.get(format!("{}/screenshot", self.session)).send().await.unwrap().json().await.unwrap();
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
        ask(&self.client, &format!("{}/{command}", self.session), parameters).await
    }

    pub async fn close(self) {
        self.client.delete(&self.session).send().await.unwrap();
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
