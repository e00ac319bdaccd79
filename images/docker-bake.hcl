// docker buildx bake -f images/docker-bake.hcl [cpu gpu tpu light]
variable "REGISTRY" { default = "fedemb" }
variable "VERSION" { default = "0.1.0" }
variable "REVISION" { default = "unknown" }
variable "CREATED" { default = "1970-01-01T00:00:00Z" }
variable "SOURCE_DATE_EPOCH" { default = "0" }
// A release names the base by digest: BASE=python:3.11-slim-bookworm@sha256:...
variable "BASE" { default = "python:3.11-slim-bookworm" }

group "default" {
  targets = ["cpu", "light"]
}

group "all" {
  targets = ["cpu", "gpu", "tpu", "light"]
}

target "flavour" {
  name       = flavour
  matrix     = { flavour = ["cpu", "gpu", "tpu", "light"] }
  context    = "."
  dockerfile = "images/Dockerfile"
  target     = "runtime"
  tags       = ["${REGISTRY}/fedemb-${flavour}:${VERSION}"]
  args = {
    BASE              = BASE
    FLAVOUR           = flavour
    VERSION           = VERSION
    REVISION          = REVISION
    CREATED           = CREATED
    SOURCE_DATE_EPOCH = SOURCE_DATE_EPOCH
  }
  // File dates inside layers become SOURCE_DATE_EPOCH: the same source gives the same digest.
  output = ["type=image,rewrite-timestamp=true"]
  attest = ["type=provenance,mode=max", "type=sbom"]
}
