//! Effects outside the database: what receivers get, what the API says meanwhile, and what is left by whoever dies.

mod mail;
mod modules;
mod processes;
mod webhooks;

use serde_json::Value;

use crate::support::{Api, Webhooks, eventually};

const SECRET: &str = "a secret for the tests";

/// Retries within milliseconds.
const QUICK: [&str; 8] = ["--retry-base", "20ms", "--retry-cap", "50ms", "--poll", "50ms", "--outbox-poll", "50ms"];

/// The flags that send notices to `receiver`, and again within milliseconds.
fn by_webhook<'a>(receiver: &'a Webhooks, more: &[&'a str]) -> Vec<&'a str> {
    by_webhook_at_leisure(&receiver.url, &[QUICK.as_slice(), more].concat())
}

fn by_webhook_at_leisure<'a>(url: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["--notify-channel", "webhook", "--webhook-url", url, "--webhook-secret", SECRET], more].concat()
}

/// Waits until the one notice is in this state.
async fn until_notice(api: &Api, state: &str) -> Value {
    let path = format!("/v1/notifications?state={state}");
    api.eventually_list(&path, 1).await.remove(0)
}

/// What the inbox has of the event that a notice is about.
async fn inbox_row(api: &Api, notice: &Value) -> Value {
    api.read(&format!("/v1/inbox/notifications/{}", notice["event_id"].as_str().unwrap())).await
}

/// Waits until the event of a notice is in this state.
async fn until_inbox(api: &Api, notice: &Value, state: &str) -> Value {
    eventually(&format!("an event that is {state}"), async || {
        let row = inbox_row(api, notice).await;
        (row["state"] == state).then_some(row)
    })
    .await
}

/// Waits for the one dead letter.
async fn until_letter(api: &Api) -> Value {
    api.eventually_list("/v1/dead-letters?state=open", 1).await.remove(0)
}

/// Waits for a notice, and then the event behind it, to be done with.
async fn until_sent(api: &Api) -> (Value, Value) {
    let notice = until_notice(api, "sent").await;
    let row = until_inbox(api, &notice, "processed").await;
    (notice, row)
}
