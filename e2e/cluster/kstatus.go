package main

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// runKstatus reads Kubernetes objects as JSON from stdin, one after the other, and
// prints for each what kstatus, the library by which Flux and Helm wait, makes of it.
func runKstatus([]string) error {
	objects := json.NewDecoder(os.Stdin)
	for objects.More() {
		var raw json.RawMessage
		if err := objects.Decode(&raw); err != nil {
			return err
		}
		object := &unstructured.Unstructured{}
		if err := object.UnmarshalJSON(raw); err != nil { // whole numbers stay whole
			return err
		}
		result, err := status.Compute(object)
		if err != nil {
			return err
		}
		fmt.Printf("%s\t%s\n", result.Status, result.Message)
	}
	return nil
}
