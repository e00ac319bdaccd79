// Kubeflow's Model Registry, built from its own module: the server of tests/components/release.
package main

import "github.com/kubeflow/model-registry/cmd"

func main() { cmd.Execute() }
