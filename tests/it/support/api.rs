//! The calls that tests make on a server, in or out of process.

use reqwest::header::{self, HeaderName, HeaderValue};
use reqwest::{Client, ClientBuilder, RequestBuilder, Response, StatusCode};
use serde_json::{Value, json};

use super::eventually;

pub struct Api {
    pub url: String,
    pub client: Client,
}

/// A client for servers without TLS: loading the system's root certificates would take most of its CPU.
pub fn http_client() -> ClientBuilder {
    // As in main.rs: a client cannot be built without a provider.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Client::builder().tls_certs_only([])
}

impl Api {
    pub fn new(url: String) -> Self {
        Self { url, client: http_client().build().unwrap() }
    }

    /// The same server, asked with a key.
    pub fn with_key(&self, key: &str) -> Self {
        self.with(header::AUTHORIZATION, &format!("Bearer {key}"))
    }

    /// The same server, asked with a browser's session.
    pub fn with_session(&self, token: &str) -> Self {
        self.with(header::COOKIE, &format!("stockade_session={token}"))
    }

    /// Logs in with a key, as a browser does.
    pub async fn log_in(&self, key: &str) -> Self {
        let response = self.post("/v1/session", &json!({ "key": key })).send().await.unwrap();
        let cookie = response.headers()["set-cookie"].to_str().unwrap().split(';').next().unwrap().to_owned();
        self.with(header::COOKIE, &cookie)
    }

    fn with(&self, name: HeaderName, value: &str) -> Self {
        let value = HeaderValue::from_str(value).unwrap();
        let client = http_client().default_headers([(name, value)].into_iter().collect());
        Self { url: self.url.clone(), client: client.build().unwrap() }
    }

    pub fn get(&self, path: &str) -> RequestBuilder {
        self.client.get(format!("{}{path}", self.url))
    }

    pub fn post(&self, path: &str, body: &Value) -> RequestBuilder {
        self.client.post(format!("{}{path}", self.url)).json(body)
    }

    pub fn put(&self, path: &str, body: &Value) -> RequestBuilder {
        self.client.put(format!("{}{path}", self.url)).json(body)
    }

    /// POSTs what must succeed and returns what it answers.
    pub async fn tell(&self, path: &str, body: &Value) -> Value {
        let response = self.post(path, body).send().await.unwrap();
        assert!(response.status().is_success(), "POST {path}: {}", response.status());
        response.json().await.unwrap()
    }

    /// GETs JSON that must be there.
    pub async fn read(&self, path: &str) -> Value {
        let response = self.get(path).send().await.unwrap();
        assert_eq!(response.status(), StatusCode::OK, "GET {path}");
        response.json().await.unwrap()
    }

    /// GETs a list and waits until it has `count` rows.
    pub async fn eventually_list(&self, path: &str, count: usize) -> Vec<Value> {
        eventually(&format!("{count} rows at {path}"), || async {
            let rows = self.read(path).await["data"].as_array().unwrap().clone();
            (rows.len() == count).then_some(rows)
        })
        .await
    }

    /// A counter without labels.
    pub async fn counter(&self, name: &str) -> u64 {
        let text = self.get("/v1/metrics").send().await.unwrap().text().await.unwrap();
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.unwrap_or_else(|| panic!("no {name}")).parse().unwrap()
    }

    /// Waits until the broker can be worked with; the embedded queue always can.
    pub async fn until_connected(&self) {
        let up = async || (self.read("/v1/health").await["broker"]["status"] == "up").then_some(());
        eventually("a broker that is up", up).await;
    }

    pub async fn put_stock(&self, sku: &str, on_hand: i64) {
        let request = self.put(&format!("/v1/stock/{sku}"), &json!({ "on_hand": on_hand }));
        assert_eq!(request.send().await.unwrap().status(), StatusCode::OK);
    }

    /// (on_hand, reserved)
    pub async fn stock(&self, sku: &str) -> (i64, i64) {
        let stock = self.read(&format!("/v1/stock/{sku}")).await;
        (stock["on_hand"].as_i64().unwrap(), stock["reserved"].as_i64().unwrap())
    }

    /// Places an order and does not wait for its outcome.
    pub async fn place(&self, customer: &str, items: &[(&str, i64)]) -> Value {
        self.tell("/v1/orders", &order(customer, items)).await
    }

    /// Places an order of one unit for `price`, which must be reserved; its id.
    pub async fn reserve(&self, sku: &str, price: i64) -> String {
        let body =
            json!({ "customer_id": "alice", "items": [{ "sku": sku, "quantity": 1, "unit_price_minor": price }] });
        let response = self.post("/v1/orders", &body).header("prefer", "wait=20").send().await.unwrap();
        let order: Value = response.json().await.unwrap();
        assert_eq!(order["status"], "reserved", "{order}");
        order["id"].as_str().unwrap().to_owned()
    }

    pub async fn pay(&self, id: &str, amount: i64) -> Response {
        self.post(&format!("/v1/orders/{id}/payments"), &json!({ "amount_minor": amount })).send().await.unwrap()
    }

    /// Cancels or fulfils an order, without a body.
    pub async fn step(&self, id: &str, step: &str) -> Response {
        self.client.post(format!("{}/v1/orders/{id}/{step}", self.url)).send().await.unwrap()
    }

    pub async fn status(&self, id: &str) -> String {
        self.read(&format!("/v1/orders/{id}")).await["status"].as_str().unwrap().to_owned()
    }

    pub async fn place_and_wait(&self, customer: &str, items: &[(&str, i64)]) -> Value {
        let response =
            self.post("/v1/orders", &order(customer, items)).header("prefer", "wait=20").send().await.unwrap();
        assert_eq!(response.status(), StatusCode::CREATED);
        response.json().await.unwrap()
    }
}

/// The body of an order.
pub fn order(customer: &str, items: &[(&str, i64)]) -> Value {
    let items: Vec<Value> = items.iter().map(|(sku, quantity)| json!({ "sku": sku, "quantity": quantity })).collect();
    json!({ "customer_id": customer, "items": items })
}
