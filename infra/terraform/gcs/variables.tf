variable "project" {
  type        = string
  description = "Project of the pipeline: buckets of artifacts, service accounts."
}

variable "keys_project" {
  type        = string
  description = "Project of the key store (Secret Manager) and nothing else; another one than project."

  validation {
    condition     = length(var.keys_project) > 0
    error_message = "Name a project of its own for the keys."
  }
}

variable "key_prefix" {
  type        = string
  description = "What names of secrets begin with; another one begins a new set of keys."
  default     = "fedemb"
}

variable "rollback_anchor_project" {
  type        = string
  description = "Project of the rollback anchor, whose owners are not those of project and keys_project; null: none."
  default     = null

  validation {
    condition     = var.rollback_anchor_project != ""
    error_message = "Name a project of its own for the rollback anchor, or leave it out."
  }
}

variable "rollback_anchor_bucket" {
  type        = string
  description = "Name of the rollback anchor's bucket; null: PROJECT-fedemb-rollback-anchor. Deployments made before the rename pass PROJECT-fedemb-witness."
  default     = null
}

variable "location" {
  type        = string
  description = "Region of all buckets."
  default     = "europe-west1"
}

variable "namespace" {
  type        = string
  description = "Kubernetes namespace of the runs."
  default     = "fedemb"
}

variable "private_input_buckets" {
  type        = set(string)
  description = "Existing buckets of private images; partition_users may read them, reserve_budget list them."
  default     = []
}

variable "public_input_buckets" {
  type        = set(string)
  description = "Existing buckets of public images; pretrain_public and partition_users may read them."
  default     = []
}

variable "policy_ids" {
  type        = set(string)
  description = "Policies (config: policy.policy_id) whose keys the partition and the trainer may use."
  default     = ["default"]
}

variable "data_owners" {
  type        = set(string)
  description = "Members (group:...) who begin policies, waive, approve and rotate keys, read diagnostics and delete private data; no machine."
  default     = []
}

variable "private_days" {
  description = "Days until private data of runs is deleted; longer than a run may wait to be resumed."
  type        = number
  default     = 90
}

variable "ledger_retention_days" {
  type        = number
  description = "No ledger record can be replaced or deleted for this long: the policy's life."
  default     = 3650
}

variable "lock_ledger" {
  type        = bool
  description = "Locks the retention for ever. Set it once the first release has been checked."
  default     = false
}
