// Swagger UI over this server's own schema; the validator, which is another site's, stays off.
SwaggerUIBundle({
  url: "/openapi.json",
  dom_id: "#docs",
  validatorUrl: null,
  deepLinking: true,
  displayRequestDuration: true,
  docExpansion: "list",
});
