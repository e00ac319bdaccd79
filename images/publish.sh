#!/usr/bin/env bash
# What the workflow `images` does, in two parts, with a scan between them:
#   images/publish.sh build FLAVOUR     builds and pushes; says `image=REF@sha256:...`
#   images/publish.sh sign IMAGE        signs the digest and attests the list of its parts
# GITHUB_REPOSITORY, GITHUB_REF_NAME, GITHUB_SHA and GITHUB_SERVER_URL are as in a workflow.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-} in
  build)
    flavour=$2
    export REGISTRY=ghcr.io/${GITHUB_REPOSITORY,,} VERSION=${GITHUB_REF_NAME#v} REVISION=$GITHUB_SHA
    said=$(mktemp)
    docker buildx bake -f images/docker-bake.hcl --push --metadata-file "$said" "$flavour"
    digest=$(python3 -c 'import json, sys
print(json.load(open(sys.argv[1]))[sys.argv[2]]["containerimage.digest"])' "$said" "$flavour")
    echo "image=$REGISTRY/fedemb-$flavour@$digest" >>"${GITHUB_OUTPUT:-/dev/stdout}"
    ;;
  sign)
    image=$2
    [[ $image =~ @sha256:[0-9a-f]{64}$ ]] || { echo "$image names no digest" >&2; exit 2; }
    parts=$(mktemp)
    docker run --rm --network none "$image" cat /opt/fedemb/sbom.cdx.json >"$parts"
    cosign sign --yes "$image"
    cosign attest --yes --type cyclonedx --predicate "$parts" "$image"
    who=(
      --certificate-oidc-issuer https://token.actions.githubusercontent.com
      --certificate-identity-regexp "^$GITHUB_SERVER_URL/$GITHUB_REPOSITORY/.github/workflows/images.yml@"
    )
    cosign verify "${who[@]}" "$image" >/dev/null
    cosign verify-attestation "${who[@]}" --type cyclonedx "$image" >/dev/null
    echo "signed: $image"
    ;;
  *)
    echo "usage: images/publish.sh build FLAVOUR | sign IMAGE" >&2
    exit 2
    ;;
esac
