#!/bin/bash
# Makes what a cluster with S3 stores in: the buckets, one user per group of steps with the policy
# of its group, and the user's access key as a secret of the cluster.
#   infra/s3/create_stores.sh mc ALIAS     MinIO, by an alias of its client `mc`
#   infra/s3/create_stores.sh aws WORD     AWS: each bucket and user name starts with WORD-
set -euo pipefail
cd "$(dirname "$0")"
groups="run plan pretrain reserve partition train evaluate audit account gate release show owner"
kind=$1 where=$2

buckets_mc() {
  for name in public private releases private-input public-input; do mc mb "$where/fedemb-$name"; done
  mc mb --with-lock "$where/fedemb-ledger"
  mc retention set --default COMPLIANCE 3650d "$where/fedemb-ledger"
}

user_mc() { # GROUP: makes the user and prints its key and its secret
  local key secret
  key=$(openssl rand -hex 10) secret=$(openssl rand -hex 20)
  {
    mc admin user add "$where" "$key" "$secret"
    mc admin policy create "$where" "fedemb-$1" "$1.json"
    mc admin policy attach "$where" "fedemb-$1" --user "$key"
  } >&2
  echo "$key $secret"
}

text() { sed "s#:::fedemb-#:::$where-fedemb-#" "$1"; }

buckets_aws() {
  local place=() lock=() region bucket
  region=$(aws configure get region || echo "${AWS_REGION:-us-east-1}")
  [ "$region" = us-east-1 ] || place=(--create-bucket-configuration "LocationConstraint=$region")
  for name in public private releases private-input public-input ledger; do
    bucket=$where-fedemb-$name
    [ "$name" != ledger ] || lock=(--object-lock-enabled-for-bucket)
    aws s3api create-bucket --bucket "$bucket" "${place[@]}" "${lock[@]}"
  done
  aws s3api put-object-lock-configuration --bucket "$bucket" --object-lock-configuration \
    'ObjectLockEnabled=Enabled,Rule={DefaultRetention={Mode=COMPLIANCE,Days=3650}}'
  aws s3api put-bucket-policy --bucket "$bucket" --policy "$(text buckets/ledger.json)"
}

user_aws() {
  local name=$where-fedemb-$1
  {
    aws iam create-user --user-name "$name"
    aws iam put-user-policy --user-name "$name" --policy-name fedemb --policy-document "$(text "$1.json")"
  } >&2
  aws iam create-access-key --user-name "$name" \
    --query 'AccessKey.[AccessKeyId,SecretAccessKey]' --output text
}

"buckets_$kind"
for group in $groups; do
  read -r key secret < <("user_$kind" "$group")
  printf '%s' "$secret" | kubectl -n fedemb create secret generic "fedemb-s3-$group" \
    --from-literal=access_key="$key" --from-file=secret_key=/dev/stdin
done
